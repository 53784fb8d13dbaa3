"""Pages, radix tree and leases (a request's page tables) together; a state machine checks integrity after each step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from srv.errors import IntegrityError
from srv.memory.cache import Cache, Lease, PageCounts
from srv.memory.groups import PageGroup
from srv.planning.pools import page_group
from srv.specs import Latent

TEXT = tuple(range(10, 30))
LATENT = Latent((0, 1), 32, 8)


def filled(cache: Cache, tokens: tuple[int, ...], namespace: str = "") -> Lease:
    """A lease with pages for all of `tokens`."""
    lease = cache.open(namespace, tokens, len(tokens))
    cache.extend(lease, len(tokens))
    return lease


def test_a_closed_lease_leaves_its_full_pages_in_the_tree_and_frees_the_rest() -> None:
    cache = Cache([PageGroup(10, 4)])
    cache.close(filled(cache, TEXT[:10]), TEXT[:10])
    assert cache.counts() == (PageCounts(total=10, free=8, cached=2, held=0),)
    assert cache.match("", TEXT, 20).units == 2


def test_tokens_that_were_not_computed_are_not_cached() -> None:
    cache = Cache([PageGroup(10, 4)])
    cache.close(filled(cache, TEXT[:16]), TEXT[:7])
    assert cache.counts()[0].cached == 1


def test_shared_pages_are_counted_as_held_once() -> None:
    cache = Cache([PageGroup(10, 4)])
    cache.close(filled(cache, TEXT[:8]), TEXT[:8])
    leases = [cache.open("", TEXT, 20) for _ in range(3)]
    assert cache.counts() == (PageCounts(total=10, free=8, cached=0, held=2),)
    for lease in leases:
        cache.close(lease, ())
    assert cache.counts() == (PageCounts(total=10, free=8, cached=2, held=0),)


def test_published_pages_are_shared_while_their_request_runs() -> None:
    cache = Cache([PageGroup(10, 4)])
    first = filled(cache, TEXT[:10])
    cache.publish(first, TEXT[:10])
    second = cache.open("", TEXT[:10], 9)
    assert second.tables[0] == first.tables[0][:2]
    cache.check_integrity(deep=True)
    cache.close(first, TEXT[:10])
    cache.close(second, ())
    assert cache.counts() == (PageCounts(total=10, free=8, cached=2, held=0),)


def test_equal_pages_stay_private_until_closed_and_are_then_freed() -> None:
    cache = Cache([PageGroup(10, 4)])
    first, second = filled(cache, TEXT[:8]), filled(cache, TEXT[:8])
    own_pages = list(second.tables[0])
    cache.publish(first, TEXT[:8])
    cache.publish(second, TEXT[:8])
    assert second.tables[0] == own_pages
    assert second.shared == 0
    assert cache.counts() == (PageCounts(total=10, free=6, cached=0, held=4),)
    cache.close(second, TEXT[:8])
    cache.close(first, TEXT[:8])
    assert cache.counts() == (PageCounts(total=10, free=8, cached=2, held=0),)


def test_pages_after_duplicate_pages_are_shared() -> None:
    cache = Cache([PageGroup(10, 4)])
    first, second = filled(cache, TEXT[:8]), filled(cache, TEXT[:16])
    own_pages = list(second.tables[0])
    cache.publish(first, TEXT[:8])
    cache.publish(second, TEXT[:16])
    assert (second.tables[0], second.shared, second.duplicates) == (own_pages, 4, (own_pages[:2],))
    cache.check_integrity(deep=True)
    third = cache.open("", TEXT[:16], 16)
    assert third.tables[0] == first.tables[0] + own_pages[2:]
    for lease in (first, third):
        cache.close(lease, ())
    assert cache.counts() == (PageCounts(total=10, free=4, cached=0, held=6),)
    cache.close(second, TEXT[:16])
    cache.check_integrity(deep=True)
    assert cache.counts() == (PageCounts(total=10, free=6, cached=4, held=0),)


def test_few_new_pages_are_not_published_after_many_duplicates() -> None:
    cache = Cache([PageGroup(20, 4)])
    first, second = filled(cache, TEXT[:12]), filled(cache, TEXT[:16])
    cache.publish(first, TEXT[:12])
    cache.publish(second, TEXT[:16])
    assert (second.shared, second.duplicates) == (0, ([],))


def test_a_longer_equal_prompt_adds_only_new_pages() -> None:
    cache = Cache([PageGroup(10, 4)])
    first, second = filled(cache, TEXT[:8]), filled(cache, TEXT[:16])
    cache.close(first, TEXT[:8])
    cache.close(second, TEXT[:16])
    assert cache.counts() == (PageCounts(total=10, free=6, cached=4, held=0),)
    assert cache.match("", TEXT, 20).units == 4
    cache.check_integrity(deep=True)


def test_extending_evicts_unheld_pages() -> None:
    cache = Cache([PageGroup(4, 4)])
    cache.close(filled(cache, TEXT[:16]), TEXT[:16])
    other = cache.open("", (1, 2, 3, 4, 5), 4)
    assert cache.available == (4,)
    assert cache.can_extend(other, 16)
    assert not cache.can_extend(other, 17)
    cache.extend(other, 16)
    assert cache.counts() == (PageCounts(total=4, free=0, cached=0, held=4),)


def test_extending_takes_free_pages_before_it_evicts() -> None:
    cache = Cache([PageGroup(4, 4)])
    cache.close(filled(cache, TEXT[:8]), TEXT[:8])
    cache.extend(cache.open("other", TEXT, 0), 8)
    assert cache.counts() == (PageCounts(total=4, free=0, cached=2, held=2),)


def test_the_smallest_group_bounds_what_is_available() -> None:
    cache = Cache([PageGroup(10, 4), PageGroup(3, 4)])
    lease = cache.open("", TEXT, 19)
    assert (cache.available, cache.max_tokens) == ((10, 3), 12)
    cache.extend(lease, 12)
    assert not cache.can_extend(lease, 13)
    with pytest.raises(IntegrityError, match="cache group 1"):
        cache.extend(lease, 13)


def test_closing_twice_raises() -> None:
    cache = Cache([PageGroup(4, 4)])
    lease = filled(cache, TEXT[:4])
    cache.close(lease, ())
    with pytest.raises(IntegrityError, match="after it had been closed"):
        cache.close(lease, ())


def test_using_a_closed_lease_raises() -> None:
    cache = Cache([PageGroup(4, 4)])
    lease = filled(cache, TEXT[:4])
    cache.close(lease, ())
    with pytest.raises(IntegrityError, match="after it had been closed"):
        cache.extend(lease, 16)
    with pytest.raises(IntegrityError, match="after it had been closed"):
        cache.publish(lease, TEXT[:4])


def test_closing_with_more_tokens_than_pages_raises() -> None:
    cache = Cache([PageGroup(4, 4)])
    with pytest.raises(IntegrityError, match="a lease of 4 positions was closed with 8 computed tokens"):
        cache.close(filled(cache, TEXT[:4]), TEXT[:8])


def test_flush_frees_all_but_not_while_a_lease_is_open() -> None:
    cache = Cache([PageGroup(10, 4)])
    cache.close(filled(cache, TEXT[:8]), TEXT[:8])
    lease = cache.open("", (1, 2), 1)
    assert cache.flush() is False
    assert cache.counts()[0].cached == 2
    cache.close(lease, ())
    assert cache.flush() is True
    assert cache.counts() == (PageCounts(total=10, free=10, cached=0, held=0),)


def test_without_prefix_cache_nothing_is_cached_or_hit() -> None:
    cache = Cache([PageGroup(10, 4)], prefix_cache=False)
    lease = filled(cache, TEXT[:8])
    cache.publish(lease, TEXT[:8])
    cache.close(lease, TEXT[:8])
    assert cache.counts() == (PageCounts(total=10, free=10, cached=0, held=0),)
    assert cache.match("", TEXT, 20).units == 0


def test_a_leaked_page_is_reported() -> None:
    cache = Cache([PageGroup(4, 4)])
    lease = filled(cache, TEXT[:8])
    lost = lease.tables[0].pop()
    with pytest.raises(IntegrityError, match=r"cache group 0: 2 free \+ 0 cached \+ 1 held != 4 pages"):
        cache.check_integrity()
    lease.tables[0].append(lease.tables[0][0])
    with pytest.raises(IntegrityError, match=rf"with two owners \[1\], pages with none \[{lost}\]"):
        cache.check_integrity(deep=True)


def windowed(window: int = 5, pages: int = 20, page_size: int = 2, unconfirmed: int = 1) -> Cache:
    """Full attention, and a sliding window with pages of its own."""
    return Cache([PageGroup(30, 2), PageGroup(pages, page_size, window)], unconfirmed=unconfirmed)


def test_pages_behind_the_window_are_freed() -> None:
    cache = windowed()
    lease = filled(cache, TEXT[:12])
    cache.trim(lease, 12)  # the next token, at position 12, needs positions 8 to 12
    assert lease.tables[1][:4] == [0] * 4
    assert cache.counts()[1] == PageCounts(total=20, free=18, cached=0, held=2)
    assert cache.counts()[0].held == 6
    cache.extend(lease, 13)
    cache.trim(lease, 13)
    cache.check_integrity(deep=True)
    assert cache.counts()[1].held == 3  # positions 9 to 13
    cache.close(lease, TEXT[:13])
    assert cache.counts()[1] == PageCounts(total=20, free=18, cached=2, held=0)


def test_a_prefix_is_hit_where_its_last_window_is_present() -> None:
    cache = windowed()
    lease = filled(cache, TEXT[:12])
    cache.trim(lease, 12)
    cache.close(lease, TEXT[:12])
    assert cache.match("", TEXT, 20).tokens == 12
    assert cache.match("", TEXT[:11], 20).tokens == 0  # the window before position 10 is gone
    again = cache.open("", TEXT, 20)
    assert (again.tables[1][:4], len(again.tables[1])) == ([0] * 4, 6)
    cache.check_integrity(deep=True)
    assert cache.counts()[1] == PageCounts(total=20, free=18, cached=0, held=2)
    cache.close(again, TEXT[:12])


def test_published_pages_behind_the_window_stay_cached_until_they_are_evicted() -> None:
    cache = windowed(pages=7)
    lease = filled(cache, TEXT[:12])
    cache.publish(lease, TEXT[:12])
    cache.trim(lease, 12)
    assert cache.counts()[1] == PageCounts(total=7, free=1, cached=4, held=2)
    assert cache.match("", TEXT[:9], 20).tokens == 8
    cache.extend(lease, 16)  # two more pages: the one that is free, and the one that was unused for the longest time
    cache.check_integrity(deep=True)
    assert cache.counts()[1] == PageCounts(total=7, free=0, cached=3, held=4)
    assert cache.match("", TEXT[:9], 20).tokens == 8  # needs positions 4 to 7
    assert cache.match("", TEXT[:7], 20).tokens == 6  # needs positions 2 to 5
    assert cache.match("", TEXT[:5], 20).tokens == 0  # needs positions 0 to 3, of which 0 and 1 were evicted
    cache.close(lease, ())


def test_a_lease_fills_holes_with_pages_of_its_own() -> None:
    cache = windowed()
    first = filled(cache, TEXT[:12])
    cache.trim(first, 12)
    cache.close(first, TEXT[:12])
    second = filled(cache, TEXT[:8])  # no hit: its pages have the content of those that were freed
    assert second.shared == 0
    cache.close(second, TEXT[:8])
    cache.check_integrity(deep=True)
    assert cache.match("", TEXT, 20).tokens == 12
    assert cache.match("", TEXT[:9], 20).tokens == 8
    assert cache.counts()[1] == PageCounts(total=20, free=14, cached=6, held=0)


def test_a_request_needs_no_more_pages_than_its_window() -> None:
    group = PageGroup(4, 2, 5)
    assert group.most_pages(unit=2, unconfirmed=1) == 4
    assert Cache([group]).max_tokens is None
    assert Cache([PageGroup(3, 2, 5)]).max_tokens == 6
    cache = Cache([group])
    lease = cache.open("", (), 0)
    for length in range(1, 100):
        assert cache.can_extend(lease, length)
        assert max(cache.growth(lease, 1000)) <= cache.available[0]
        cache.extend(lease, length)
        cache.trim(lease, length)
    cache.close(lease, ())


def test_groups_with_pages_of_different_sizes_share_a_prefix_in_whole_pages_of_each() -> None:
    cache = Cache([PageGroup(20, 2), PageGroup(10, 4)])
    assert cache.unit == 4
    cache.close(filled(cache, TEXT[:15]), TEXT[:15])
    assert [counts.cached for counts in cache.counts()] == [6, 3]
    hit = cache.open("", TEXT, 20)
    assert (hit.capacity, [len(table) for table in hit.tables]) == (12, [6, 3])
    cache.extend(hit, 13)
    assert (hit.capacity, [len(table) for table in hit.tables]) == (14, [7, 4])
    cache.close(hit, TEXT[:13])


class CacheMachine(RuleBasedStateMachine):
    """Leases over a small alphabet, so that prefixes are shared; every page is tagged with the tokens written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: list[tuple[Lease, tuple[int, ...], str]] = []
        self.confirmed: dict[Lease, int] = {}
        self.written: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}

    @initialize(
        groups=st.sampled_from(
            [
                (PageGroup(12, 2), PageGroup(9, 2)),
                (PageGroup(12, 2), PageGroup(9, 2, 3)),
                (PageGroup(12, 2), PageGroup(7, 4, 6)),
                (PageGroup(9, 2, 4),),
                (page_group(LATENT, 12, 2),),
                (page_group(LATENT, 14, 2), PageGroup(9, 2, 3)),
                (PageGroup(20, 1, 1), PageGroup(9, 2, 5), PageGroup(12, 2)),
            ]
        )
    )
    def start(self, groups: tuple[PageGroup, ...]) -> None:
        self.cache = Cache(groups, unconfirmed=14)
        self.groups = groups

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
        namespace=st.sampled_from(["", "tenant"]),
        extend=st.integers(0, 14),
    )
    def open(self, tokens: tuple[int, ...], namespace: str, extend: int) -> None:
        limit = len(tokens) - 1
        hit = self.cache.match(namespace, tokens, limit)
        before = self.cache.available
        growth = self.cache.growth(hit, len(tokens))
        lease = self.cache.open(namespace, tokens, limit)
        assert lease.capacity == lease.shared * self.cache.unit == hit.tokens <= limit
        assert tuple(lease.held) == hit.held
        assert self.cache.growth(lease, len(tokens)) == growth
        assert self.cache.available == tuple(was - held for was, held in zip(before, hit.unlocked, strict=True))
        self.leases.append((lease, tokens, namespace))
        self.confirmed[lease] = lease.capacity
        self.check_readable(lease, tokens, namespace)
        self.extend(len(self.leases) - 1, extend)

    def check_readable(self, lease: Lease, tokens: tuple[int, ...], namespace: str) -> None:
        """The next token finds the keys and values of its own prefix in every group."""
        position = self.confirmed[lease]
        for number, (group, table) in enumerate(zip(self.groups, lease.tables, strict=True)):
            for place in range(group.first_needed_page(position), position // group.page_size):
                end = (place + 1) * group.page_size
                assert self.written[number, table[place]] == (namespace, tokens[:end])

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), more=st.integers(1, 6))
    def extend(self, which: int, more: int) -> None:
        lease, tokens, namespace = self.leases[which % len(self.leases)]
        reach = min(lease.capacity + more, len(tokens))
        if reach <= lease.capacity or not self.cache.can_extend(lease, reach):
            return
        old = [len(table) for table in lease.tables]
        self.cache.extend(lease, reach)
        assert lease.capacity >= reach
        for number, (group, table) in enumerate(zip(self.groups, lease.tables, strict=True)):
            for place in range(old[number], len(table)):
                end = (place + 1) * group.page_size
                self.written[number, table[place]] = (namespace, tokens[:end])

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), more=st.integers(0, 9))
    def confirm_and_trim(self, which: int, more: int) -> None:
        lease, tokens, namespace = self.leases[which % len(self.leases)]
        self.confirmed[lease] = min(self.confirmed[lease] + more, lease.capacity, len(tokens))
        held = lease.held
        self.cache.trim(lease, self.confirmed[lease])
        assert all(now <= before for now, before in zip(lease.held, held, strict=True))
        for group, count in zip(self.groups, lease.held, strict=True):
            most = group.most_pages(self.cache.unit, max(0, lease.capacity - self.confirmed[lease]))
            assert most is None or count <= most
        self.check_readable(lease, tokens, namespace)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def publish(self, which: int) -> None:
        lease, tokens, _ = self.leases[which % len(self.leases)]
        tables = [list(table) for table in lease.tables]
        self.cache.publish(lease, tokens[: lease.capacity])
        assert [list(table) for table in lease.tables] == tables

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), computed=st.integers(0, 14))
    def close(self, which: int, computed: int) -> None:
        lease, tokens, namespace = self.leases.pop(which % len(self.leases))
        confirmed = tokens[: min(max(computed, self.confirmed[lease]), lease.capacity)]
        self.cache.close(lease, confirmed)
        if not self.cache.has_windows:
            assert self.cache.match(namespace, confirmed, len(confirmed)).units >= len(confirmed) // self.cache.unit

    @rule()
    def flush(self) -> None:
        assert self.cache.flush() is (not self.leases)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity(deep=True)

    @invariant()
    def nobody_writes_where_another_reads(self) -> None:
        for number, group in enumerate(getattr(self, "groups", ())):
            own_pages: list[int] = []
            shared: set[int] = set()
            for lease, _, _ in self.leases:
                end = lease.shared * self.cache.unit // group.page_size
                own_pages += [page for page in lease.tables[number][end:] if page]
                shared.update(lease.tables[number][:end])
            assert len(set(own_pages)) == len(own_pages)
            assert shared.isdisjoint(own_pages)

    def teardown(self) -> None:
        for lease, tokens, _ in self.leases:
            self.cache.close(lease, tokens[: self.confirmed[lease]])
        if hasattr(self, "cache"):
            assert self.cache.flush()
            assert [counts.free for counts in self.cache.counts()] == [group.pages for group in self.groups]


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
