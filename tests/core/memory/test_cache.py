"""Pages, radix tree and leases (a request's page tables) together; a state machine checks integrity after each step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from srv.errors import IntegrityError
from srv.memory.cache import Cache, Lease, PageCounts

TEXT = tuple(range(10, 30))


def filled(cache: Cache, tokens: tuple[int, ...], namespace: str = "") -> Lease:
    """A lease with pages for all of `tokens`."""
    lease = cache.open(namespace, tokens, len(tokens))
    cache.extend(lease, len(tokens))
    return lease


def test_a_closed_lease_leaves_its_full_pages_in_the_tree_and_frees_the_rest() -> None:
    cache = Cache([10], 4)
    cache.close(filled(cache, TEXT[:10]), TEXT[:10])
    assert cache.counts() == (PageCounts(total=10, free=8, cached=2, held=0),)
    assert cache.match("", TEXT, 20).pages == 2


def test_tokens_that_were_not_computed_are_not_cached() -> None:
    cache = Cache([10], 4)
    cache.close(filled(cache, TEXT[:16]), TEXT[:7])
    assert cache.counts()[0].cached == 1


def test_shared_pages_are_counted_as_held_once() -> None:
    cache = Cache([10], 4)
    cache.close(filled(cache, TEXT[:8]), TEXT[:8])
    leases = [cache.open("", TEXT, 20) for _ in range(3)]
    assert cache.counts() == (PageCounts(total=10, free=8, cached=0, held=2),)
    for lease in leases:
        cache.close(lease, ())
    assert cache.counts() == (PageCounts(total=10, free=8, cached=2, held=0),)


def test_published_pages_are_shared_while_their_request_runs() -> None:
    cache = Cache([10], 4)
    first = filled(cache, TEXT[:10])
    cache.publish(first, TEXT[:10])
    second = cache.open("", TEXT[:10], 9)
    assert second.tables[0] == first.tables[0][:2]
    cache.check_integrity(deep=True)
    cache.close(first, TEXT[:10])
    cache.close(second, ())
    assert cache.counts() == (PageCounts(total=10, free=8, cached=2, held=0),)


def test_equal_pages_stay_private_until_closed_and_are_then_freed() -> None:
    cache = Cache([10], 4)
    first, second = filled(cache, TEXT[:8]), filled(cache, TEXT[:8])
    own = list(second.tables[0])
    cache.publish(first, TEXT[:8])
    cache.publish(second, TEXT[:8])
    assert second.tables[0] == own
    assert second.shared == 0
    assert cache.counts() == (PageCounts(total=10, free=6, cached=0, held=4),)
    cache.close(second, TEXT[:8])
    cache.close(first, TEXT[:8])
    assert cache.counts() == (PageCounts(total=10, free=8, cached=2, held=0),)


def test_pages_after_duplicate_pages_are_shared() -> None:
    cache = Cache([10], 4)
    first, second = filled(cache, TEXT[:8]), filled(cache, TEXT[:16])
    own = list(second.tables[0])
    cache.publish(first, TEXT[:8])
    cache.publish(second, TEXT[:16])
    assert (second.tables[0], second.shared, second.duplicates) == (own, 4, (own[:2],))
    cache.check_integrity(deep=True)
    third = cache.open("", TEXT[:16], 16)
    assert third.tables[0] == first.tables[0] + own[2:]
    for lease in (first, third):
        cache.close(lease, ())
    assert cache.counts() == (PageCounts(total=10, free=4, cached=0, held=6),)
    cache.close(second, TEXT[:16])
    cache.check_integrity(deep=True)
    assert cache.counts() == (PageCounts(total=10, free=6, cached=4, held=0),)


def test_few_new_pages_are_not_published_after_many_duplicates() -> None:
    cache = Cache([20], 4)
    first, second = filled(cache, TEXT[:12]), filled(cache, TEXT[:16])
    cache.publish(first, TEXT[:12])
    cache.publish(second, TEXT[:16])
    assert (second.shared, second.duplicates) == (0, ([],))


def test_a_longer_equal_prompt_adds_only_new_pages() -> None:
    cache = Cache([10], 4)
    first, second = filled(cache, TEXT[:8]), filled(cache, TEXT[:16])
    cache.close(first, TEXT[:8])
    cache.close(second, TEXT[:16])
    assert cache.counts() == (PageCounts(total=10, free=6, cached=4, held=0),)
    assert cache.match("", TEXT, 20).pages == 4
    cache.check_integrity(deep=True)


def test_extending_evicts_unheld_pages() -> None:
    cache = Cache([4], 4)
    cache.close(filled(cache, TEXT[:16]), TEXT[:16])
    other = cache.open("", (1, 2, 3, 4, 5), 4)
    assert cache.available == 4
    assert cache.can_extend(other, 16)
    assert not cache.can_extend(other, 17)
    cache.extend(other, 16)
    assert cache.counts() == (PageCounts(total=4, free=0, cached=0, held=4),)


def test_extending_takes_free_pages_before_it_evicts() -> None:
    cache = Cache([4], 4)
    cache.close(filled(cache, TEXT[:8]), TEXT[:8])
    cache.extend(cache.open("other", TEXT, 0), 8)
    assert cache.counts() == (PageCounts(total=4, free=0, cached=2, held=2),)


def test_the_smallest_group_bounds_what_is_available() -> None:
    cache = Cache([10, 3], 4)
    lease = cache.open("", TEXT, 19)
    assert cache.available == cache.total == 3
    cache.extend(lease, 12)
    assert not cache.can_extend(lease, 13)
    with pytest.raises(IntegrityError, match="cache group 1"):
        cache.extend(lease, 13)


def test_closing_twice_raises() -> None:
    cache = Cache([4], 4)
    lease = filled(cache, TEXT[:4])
    cache.close(lease, ())
    with pytest.raises(IntegrityError, match="after it had been closed"):
        cache.close(lease, ())


def test_using_a_closed_lease_raises() -> None:
    cache = Cache([4], 4)
    lease = filled(cache, TEXT[:4])
    cache.close(lease, ())
    with pytest.raises(IntegrityError, match="after it had been closed"):
        cache.extend(lease, 16)
    with pytest.raises(IntegrityError, match="after it had been closed"):
        cache.publish(lease, TEXT[:4])


def test_closing_with_more_tokens_than_pages_raises() -> None:
    cache = Cache([4], 4)
    with pytest.raises(IntegrityError, match="1 pages was closed with 2 pages"):
        cache.close(filled(cache, TEXT[:4]), TEXT[:8])


def test_flush_frees_all_but_not_while_a_lease_is_open() -> None:
    cache = Cache([10], 4)
    cache.close(filled(cache, TEXT[:8]), TEXT[:8])
    lease = cache.open("", (1, 2), 1)
    assert cache.flush() is False
    assert cache.counts()[0].cached == 2
    cache.close(lease, ())
    assert cache.flush() is True
    assert cache.counts() == (PageCounts(total=10, free=10, cached=0, held=0),)


def test_without_prefix_cache_nothing_is_cached_or_hit() -> None:
    cache = Cache([10], 4, prefix_cache=False)
    lease = filled(cache, TEXT[:8])
    cache.publish(lease, TEXT[:8])
    cache.close(lease, TEXT[:8])
    assert cache.counts() == (PageCounts(total=10, free=10, cached=0, held=0),)
    assert cache.match("", TEXT, 20).pages == 0


def test_a_leaked_page_is_reported() -> None:
    cache = Cache([4], 4)
    lease = filled(cache, TEXT[:8])
    lost = lease.tables[0].pop()
    with pytest.raises(IntegrityError, match=r"cache group 0: 2 free \+ 0 cached \+ 1 held != 4 pages"):
        cache.check_integrity()
    lease.tables[0].append(lease.tables[0][0])
    with pytest.raises(IntegrityError, match=rf"with two owners \[1\], pages with none \[{lost}\]"):
        cache.check_integrity(deep=True)


class CacheMachine(RuleBasedStateMachine):
    """Leases over a small alphabet, so that prefixes are shared; every page is tagged with the tokens written to it."""

    page_size = 2
    totals = (12, 9)

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(self.totals, self.page_size)
        self.leases: list[tuple[Lease, tuple[int, ...], str]] = []
        self.written: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
        namespace=st.sampled_from(["", "tenant"]),
        extend=st.integers(0, 14),
    )
    def open(self, tokens: tuple[int, ...], namespace: str, extend: int) -> None:
        limit = len(tokens) - 1
        hit = self.cache.match(namespace, tokens, limit)
        before = self.cache.available
        lease = self.cache.open(namespace, tokens, limit)
        assert lease.pages == lease.shared == hit.pages <= limit // self.page_size
        assert self.cache.available == before - hit.unlocked
        for group, table in enumerate(lease.tables):
            for place, page in enumerate(table):
                assert self.written[group, page] == (namespace, tokens[: (place + 1) * self.page_size])
        self.leases.append((lease, tokens, namespace))
        self.extend(len(self.leases) - 1, extend)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), more=st.integers(1, 6))
    def extend(self, which: int, more: int) -> None:
        lease, tokens, namespace = self.leases[which % len(self.leases)]
        reach = min(lease.pages * self.page_size + more, len(tokens))
        if not self.cache.can_extend(lease, reach):
            return
        old = lease.pages
        self.cache.extend(lease, reach)
        assert lease.pages == max(old, -(-reach // self.page_size))
        for group, table in enumerate(lease.tables):
            for place in range(old, lease.pages):
                self.written[group, table[place]] = (namespace, tokens[: (place + 1) * self.page_size])

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def publish(self, which: int) -> None:
        lease, tokens, _ = self.leases[which % len(self.leases)]
        tables = [list(table) for table in lease.tables]
        self.cache.publish(lease, tokens[: lease.pages * self.page_size])
        assert [list(table) for table in lease.tables] == tables

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), computed=st.integers(0, 14))
    def close(self, which: int, computed: int) -> None:
        lease, tokens, namespace = self.leases.pop(which % len(self.leases))
        known = tokens[: min(computed, lease.pages * self.page_size)]
        self.cache.close(lease, known)
        assert self.cache.match(namespace, known, len(known)).pages >= len(known) // self.page_size

    @rule()
    def flush(self) -> None:
        assert self.cache.flush() is (not self.leases)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.cache.check_integrity(deep=True)

    @invariant()
    def nobody_writes_where_another_reads(self) -> None:
        private = [page for lease, _, _ in self.leases for page in lease.tables[0][lease.shared :]]
        shared = {page for lease, _, _ in self.leases for page in lease.tables[0][: lease.shared]}
        assert len(set(private)) == len(private)
        assert shared.isdisjoint(private)

    def teardown(self) -> None:
        for lease, tokens, _ in self.leases:
            self.cache.close(lease, tokens[: lease.pages * self.page_size])
        assert self.cache.flush()
        assert [counts.free for counts in self.cache.counts()] == list(self.totals)


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
