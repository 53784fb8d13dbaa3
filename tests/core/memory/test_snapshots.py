"""Snapshots of recurrent states: where a prefix can be continued, which are evicted, and that none is lost."""

from __future__ import annotations

import pytest

from srv.errors import IntegrityError
from srv.memory.cache import Cache, Lease
from srv.memory.groups import PageGroup
from srv.memory.snapshots import SnapshotCounts, Snapshots

PAGE, FIRST = 2, 5
LONG = tuple(range(10))


def cache(count: int = 4, pages: int = 40, prefix_cache: bool = True) -> Cache:
    return Cache([PageGroup(pages, PAGE)], prefix_cache, snapshots=Snapshots(FIRST, count))


def computed(prefix_cache: Cache, tokens: tuple[int, ...], *positions: int) -> Lease:
    """An open lease with the pages of these tokens and snapshots at these positions."""
    lease = prefix_cache.open("", tokens, len(tokens) - 1)
    prefix_cache.extend(lease, len(tokens))
    for position in positions:
        assert prefix_cache.save(lease, position, len(tokens))
    return lease


def cached(prefix_cache: Cache, tokens: tuple[int, ...], *positions: int) -> None:
    prefix_cache.close(computed(prefix_cache, tokens, *positions), tokens)
    prefix_cache.check_integrity(deep=True)


def counts(prefix_cache: Cache) -> tuple[int, int, int]:
    """Free, cached and held."""
    snapshots = prefix_cache.snapshot_counts()
    return snapshots.free, snapshots.cached, snapshots.held


def test_a_prefix_matches_up_to_the_last_snapshot_within_the_limit() -> None:
    prefix_cache = cache()
    cached(prefix_cache, LONG, 4, 8)
    assert [prefix_cache.match("", LONG, limit).tokens for limit in (10, 8, 7, 4, 3)] == [8, 8, 4, 4, 0]
    assert prefix_cache.match("", (*LONG[:6], 99, 98, 97), 9).tokens == 4
    assert prefix_cache.match("", (*LONG[:2], 99), 3).tokens == 0
    assert counts(prefix_cache) == (2, 2, 0)


def test_without_snapshots_no_prefix_is_claimed() -> None:
    prefix_cache = cache(count=0)
    lease = prefix_cache.open("", LONG, 9)
    prefix_cache.extend(lease, 10)
    assert prefix_cache.save(lease, 8, 10) == 0
    prefix_cache.close(lease, LONG)
    assert prefix_cache.match("", LONG, 9).tokens == 0
    assert prefix_cache.snapshot_counts() == SnapshotCounts(0, 0, 0, 0)


def test_a_lease_goes_on_from_the_slot_of_its_prefix() -> None:
    prefix_cache = cache()
    cached(prefix_cache, LONG, 4, 8)
    first = prefix_cache.open("", LONG[:6], 5)
    second = prefix_cache.open("", (*LONG, 1, 2), 11)
    assert (first.capacity, first.restored) == (4, FIRST)
    assert (second.capacity, second.restored) == (8, FIRST + 1)
    assert prefix_cache.open("", (77,), 0).restored == 0
    prefix_cache.check_integrity(deep=True)


def test_places_to_save_are_branches_and_the_last_unit() -> None:
    prefix_cache = cache()
    cached(prefix_cache, LONG, 8)
    lease = prefix_cache.open("", (*LONG[:6], 50, 51, 52, 53, 54), 10)
    assert lease.capacity == 0
    assert prefix_cache.places_to_save(lease, (*LONG[:6], 50, 51, 52, 53, 54)) == (6, 10)
    assert prefix_cache.places_to_save(lease, (50, 51, 52, 53)) == (2,)
    assert prefix_cache.places_to_save(lease, (50, 51)) == ()
    assert cache(prefix_cache=False).places_to_save(lease, LONG) == ()


def test_a_limited_hit_saves_nothing_that_the_tree_has() -> None:
    """Requests for the prompt's logprobs compute positions again that are cached."""
    prefix_cache = cache()
    cached(prefix_cache, LONG, 8)
    assert prefix_cache.places_to_save(prefix_cache.open("", LONG, 0), LONG) == ()
    longer = (*LONG, 50, 51, 52)
    assert prefix_cache.places_to_save(prefix_cache.open("", longer, 0), longer) == (10, 12)


def test_a_snapshot_in_the_middle_of_a_node_goes_with_its_part() -> None:
    prefix_cache = cache()
    cached(prefix_cache, LONG, 4, 8)
    cached(prefix_cache, (*LONG[:6], 50, 51), 6)  # splits the node at 6, and ends there
    assert prefix_cache.match("", LONG, 9).tokens == 8
    assert prefix_cache.match("", (*LONG[:6], 60, 61), 9).tokens == 6
    assert prefix_cache.match("", (*LONG[:4], 60, 61), 9).tokens == 4


def test_the_snapshot_that_was_not_used_for_longest_is_evicted() -> None:
    prefix_cache = cache(count=2)
    cached(prefix_cache, (1, 1, 1), 2)
    cached(prefix_cache, (2, 2, 2), 2)
    prefix_cache.close(prefix_cache.open("", (1, 1, 1), 2), ())
    cached(prefix_cache, (3, 3, 3), 2)
    assert [prefix_cache.match("", (token,) * 3, 2).tokens for token in (1, 2, 3)] == [2, 0, 2]
    assert counts(prefix_cache) == (0, 2, 0)


def test_matches_change_only_when_a_snapshot_is_evicted() -> None:
    prefix_cache = cache(count=2)
    cached(prefix_cache, (1, 1, 1), 2)
    lease = prefix_cache.open("", LONG, 9)
    prefix_cache.extend(lease, 10)
    before = prefix_cache.version
    assert prefix_cache.save(lease, 4, 10)  # takes the free slot
    assert prefix_cache.version == before
    assert prefix_cache.save(lease, 8, 10)
    assert prefix_cache.version > before
    assert prefix_cache.match("", (1, 1, 1), 2).tokens == 0


def test_snapshots_are_evicted_with_their_pages() -> None:
    prefix_cache = cache(pages=8)
    cached(prefix_cache, LONG, 4, 8)
    computed(prefix_cache, tuple(range(50, 60)))  # takes the pages of the last two units
    prefix_cache.check_integrity(deep=True)
    assert counts(prefix_cache) == (3, 1, 0)
    assert prefix_cache.match("", LONG, 9).tokens == 4
    assert not prefix_cache.flush()


def test_an_equal_snapshot_is_given_back() -> None:
    prefix_cache = cache()
    first, second = computed(prefix_cache, LONG, 8), computed(prefix_cache, LONG, 8)
    assert counts(prefix_cache) == (2, 0, 2)
    prefix_cache.publish(first, LONG)
    prefix_cache.close(second, LONG)
    prefix_cache.close(first, LONG)
    prefix_cache.check_integrity(deep=True)
    assert counts(prefix_cache) == (3, 1, 0)


def test_an_aborted_lease_keeps_only_snapshots_of_computed_tokens() -> None:
    prefix_cache = cache()
    prefix_cache.close(computed(prefix_cache, LONG, 4, 8), LONG[:5])
    prefix_cache.check_integrity(deep=True)
    assert counts(prefix_cache) == (3, 1, 0)
    assert prefix_cache.match("", LONG, 9).tokens == 4
    prefix_cache.close(computed(prefix_cache, (7,) * 9, 4), ())
    assert counts(prefix_cache) == (3, 1, 0)


def test_a_lease_keeps_the_last_snapshot_of_its_output_only() -> None:
    prefix_cache = cache(count=2)
    lease = computed(prefix_cache, LONG[:6], 4)
    prefix_cache.extend(lease, 20)
    assert prefix_cache.save(lease, 8, 6) == prefix_cache.save(lease, 12, 6) == prefix_cache.save(lease, 16, 6) != 0
    assert counts(prefix_cache) == (0, 0, 2)
    prefix_cache.close(lease, tuple(range(18)))
    assert prefix_cache.match("", tuple(range(18)), 17).tokens == 16


def test_flushing_frees_all_snapshots() -> None:
    prefix_cache = cache()
    cached(prefix_cache, LONG, 4, 8)
    assert prefix_cache.flush()
    prefix_cache.check_integrity(deep=True)
    assert counts(prefix_cache) == (4, 0, 0)


def test_slots_that_do_not_add_up_are_reported() -> None:
    snapshots = Snapshots(FIRST, 2)
    with pytest.raises(IntegrityError, match="no lease holds slot 9"):
        snapshots.drop(9)
    slot = snapshots.take()
    with pytest.raises(IntegrityError, match=rf"leases hold slots \[\], recorded are \[{slot}\]"):
        snapshots.check_integrity(())
    snapshots.total = 3
    with pytest.raises(IntegrityError, match=r"1 free \+ 0 cached \+ 1 held != 3"):
        snapshots.check_integrity([slot])
