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


def computed(made: Cache, tokens: tuple[int, ...], *positions: int) -> Lease:
    """An open lease with the pages of these tokens and snapshots at these positions."""
    lease = made.open("", tokens, len(tokens) - 1)
    made.extend(lease, len(tokens))
    for position in positions:
        assert made.save(lease, position, len(tokens))
    return lease


def cached(made: Cache, tokens: tuple[int, ...], *positions: int) -> None:
    made.close(computed(made, tokens, *positions), tokens)
    made.check_integrity(deep=True)


def counts(made: Cache) -> tuple[int, int, int]:
    """Free, cached and held."""
    found = made.snapshot_counts()
    return found.free, found.cached, found.held


def test_a_prefix_matches_up_to_the_last_snapshot_within_the_limit() -> None:
    made = cache()
    cached(made, LONG, 4, 8)
    assert [made.match("", LONG, limit).tokens for limit in (10, 8, 7, 4, 3)] == [8, 8, 4, 4, 0]
    assert made.match("", (*LONG[:6], 99, 98, 97), 9).tokens == 4
    assert made.match("", (*LONG[:2], 99), 3).tokens == 0
    assert counts(made) == (2, 2, 0)


def test_without_snapshots_no_prefix_is_claimed() -> None:
    made = cache(count=0)
    lease = made.open("", LONG, 9)
    made.extend(lease, 10)
    assert made.save(lease, 8, 10) == 0
    made.close(lease, LONG)
    assert made.match("", LONG, 9).tokens == 0
    assert made.snapshot_counts() == SnapshotCounts(0, 0, 0, 0)


def test_a_lease_goes_on_from_the_slot_of_its_prefix() -> None:
    made = cache()
    cached(made, LONG, 4, 8)
    first = made.open("", LONG[:6], 5)
    second = made.open("", (*LONG, 1, 2), 11)
    assert (first.capacity, first.restored) == (4, FIRST)
    assert (second.capacity, second.restored) == (8, FIRST + 1)
    assert made.open("", (77,), 0).restored == 0
    made.check_integrity(deep=True)


def test_places_to_save_are_branches_and_the_last_unit() -> None:
    made = cache()
    cached(made, LONG, 8)
    lease = made.open("", (*LONG[:6], 50, 51, 52, 53, 54), 10)
    assert lease.capacity == 0
    assert made.places_to_save(lease, (*LONG[:6], 50, 51, 52, 53, 54)) == (6, 10)
    assert made.places_to_save(lease, (50, 51, 52, 53)) == (2,)
    assert made.places_to_save(lease, (50, 51)) == ()
    assert cache(prefix_cache=False).places_to_save(lease, LONG) == ()


def test_a_limited_hit_saves_nothing_that_the_tree_has() -> None:
    """Requests for the prompt's logprobs compute positions again that are cached."""
    made = cache()
    cached(made, LONG, 8)
    assert made.places_to_save(made.open("", LONG, 0), LONG) == ()
    longer = (*LONG, 50, 51, 52)
    assert made.places_to_save(made.open("", longer, 0), longer) == (10, 12)


def test_a_snapshot_in_the_middle_of_a_node_goes_with_its_part() -> None:
    made = cache()
    cached(made, LONG, 4, 8)
    cached(made, (*LONG[:6], 50, 51), 6)  # splits the node at 6, and ends there
    assert made.match("", LONG, 9).tokens == 8
    assert made.match("", (*LONG[:6], 60, 61), 9).tokens == 6
    assert made.match("", (*LONG[:4], 60, 61), 9).tokens == 4


def test_the_snapshot_that_was_not_used_for_longest_is_evicted() -> None:
    made = cache(count=2)
    cached(made, (1, 1, 1), 2)
    cached(made, (2, 2, 2), 2)
    made.close(made.open("", (1, 1, 1), 2), ())
    cached(made, (3, 3, 3), 2)
    assert [made.match("", (token,) * 3, 2).tokens for token in (1, 2, 3)] == [2, 0, 2]
    assert counts(made) == (0, 2, 0)


def test_matches_change_only_when_a_snapshot_is_evicted() -> None:
    made = cache(count=2)
    cached(made, (1, 1, 1), 2)
    lease = made.open("", LONG, 9)
    made.extend(lease, 10)
    before = made.version
    assert made.save(lease, 4, 10)  # takes the free slot
    assert made.version == before
    assert made.save(lease, 8, 10)
    assert made.version > before
    assert made.match("", (1, 1, 1), 2).tokens == 0


def test_snapshots_are_evicted_with_their_pages() -> None:
    made = cache(pages=8)
    cached(made, LONG, 4, 8)
    computed(made, tuple(range(50, 60)))  # takes the pages of the last two units
    made.check_integrity(deep=True)
    assert counts(made) == (3, 1, 0)
    assert made.match("", LONG, 9).tokens == 4
    assert not made.flush()


def test_an_equal_snapshot_is_given_back() -> None:
    made = cache()
    first, second = computed(made, LONG, 8), computed(made, LONG, 8)
    assert counts(made) == (2, 0, 2)
    made.publish(first, LONG)
    made.close(second, LONG)
    made.close(first, LONG)
    made.check_integrity(deep=True)
    assert counts(made) == (3, 1, 0)


def test_an_aborted_lease_keeps_only_snapshots_of_computed_tokens() -> None:
    made = cache()
    made.close(computed(made, LONG, 4, 8), LONG[:5])
    made.check_integrity(deep=True)
    assert counts(made) == (3, 1, 0)
    assert made.match("", LONG, 9).tokens == 4
    made.close(computed(made, (7,) * 9, 4), ())
    assert counts(made) == (3, 1, 0)


def test_a_lease_keeps_the_last_snapshot_of_its_output_only() -> None:
    made = cache(count=2)
    lease = computed(made, LONG[:6], 4)
    made.extend(lease, 20)
    assert made.save(lease, 8, 6) == made.save(lease, 12, 6) == made.save(lease, 16, 6) != 0
    assert counts(made) == (0, 0, 2)
    made.close(lease, tuple(range(18)))
    assert made.match("", tuple(range(18)), 17).tokens == 16


def test_flushing_frees_all_snapshots() -> None:
    made = cache()
    cached(made, LONG, 4, 8)
    assert made.flush()
    made.check_integrity(deep=True)
    assert counts(made) == (4, 0, 0)


def test_slots_that_do_not_add_up_are_reported() -> None:
    made = Snapshots(FIRST, 2)
    with pytest.raises(IntegrityError, match="no lease holds slot 9"):
        made.drop(9)
    slot = made.take()
    with pytest.raises(IntegrityError, match=rf"leases hold slots \[\], recorded are \[{slot}\]"):
        made.check_integrity(())
    made.total = 3
    with pytest.raises(IntegrityError, match=r"1 free \+ 0 cached \+ 1 held != 3"):
        made.check_integrity([slot])
