"""Pages of every cache group and the prefix tree over them, held together by leases.

Owns who holds which page. Must not know requests, steps or devices. Every page is in one of three places:

    free (allocator)  ──extend──▶  private to one lease  ──publish/close──▶  prefix tree
          ▲                              │close                         locked: held   unlocked: cached
          └──────────────────────────────┴──────────────evict───────────────────────────────┘

A lease's table is `[shared pages | private pages]`. Shared pages belong to the tree and are locked by the
lease. Two leases may compute equal pages at the same time. The first to publish brings them into the tree; the
other's equal ones stay its own (a page table is append-only while a request runs), as `spare` pages where those
behind them are shared, and are freed when it is closed. So equal content is never in the tree twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from srv.errors import IntegrityError
from srv.memory.pages import PageAllocator
from srv.memory.radix import Match, Node, Pages, RadixTree


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of one cache group: free + cached (in the tree, unlocked) + held (by leases) == total."""

    total: int
    free: int
    cached: int
    held: int


class Lease:
    """The pages of one running request: `tables[group]`, of which the first `shared` are in the tree.

    `spare[group]` are those of the first `shared` that are not the tree's: it has equal ones, locked like the rest.
    """

    __slots__ = ("namespace", "node", "shared", "spare", "tables")

    def __init__(self, namespace: str, node: Node, tables: tuple[list[int], ...]) -> None:
        self.namespace = namespace
        self.node = node
        self.tables = tables
        self.shared = len(tables[0])
        self.spare: tuple[list[int], ...] = tuple([] for _ in tables)

    @property
    def pages(self) -> int:
        return len(self.tables[0])


class Cache:
    """The page bookkeeping of one pool. `pages[group]` usable pages each, all groups of one page size.

    With `prefix_cache` false nothing is ever matched or kept.
    """

    def __init__(self, pages: Sequence[int], page_size: int, prefix_cache: bool = True) -> None:
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._allocators = tuple(PageAllocator(group, total) for group, total in enumerate(pages))
        self._tree = RadixTree(page_size, len(self._allocators))
        self._leases: set[Lease] = set()
        self.no_pages: Pages = ((),) * len(self._allocators)

    @property
    def total(self) -> int:
        """Pages that one lease could hold at most: those of the smallest group."""
        return min(allocator.total for allocator in self._allocators)

    @property
    def available(self) -> int:
        """Pages that could be allocated now in every group, by eviction if need be."""
        return min(allocator.free_count for allocator in self._allocators) + self._tree.unlocked_pages

    @property
    def version(self) -> int:
        """Changes whenever the answer of `match` may have changed."""
        return self._tree.version

    @property
    def open_leases(self) -> int:
        return len(self._leases)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def match(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Match:
        """The longest cached prefix of full pages within the first `limit` tokens. Changes nothing."""
        if not self.prefix_cache:
            return Match(0, 0)
        return self._tree.match(namespace, tokens, limit // self.page_size)

    def open(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Lease:
        """A lease that begins with the prefix that `match` finds, locked."""
        node, pages = self._tree.acquire(namespace, tokens, limit // self.page_size if self.prefix_cache else 0)
        lease = Lease(namespace, node, tuple(list(table) for table in pages))
        self._leases.add(lease)
        return lease

    def can_extend(self, lease: Lease, tokens: int) -> bool:
        """Whether the lease could get pages for its first `tokens` positions now."""
        return self.pages_for(tokens) - lease.pages <= self.available

    def extend(self, lease: Lease, tokens: int) -> None:
        """Append pages until the first `tokens` positions have some, evicting if need be.

        Raises IntegrityError where `can_extend` would have said no.
        """
        missing = self.pages_for(tokens) - lease.pages
        if missing <= 0:
            return
        self._require(lease)
        short = missing - min(allocator.free_count for allocator in self._allocators)
        if short > 0:
            self._free(self._tree.evict(short))
        for table, allocator in zip(lease.tables, self._allocators, strict=True):
            table.extend(allocator.allocate(missing))

    def publish(self, lease: Lease, tokens: tuple[int, ...]) -> None:
        """Share the full pages of `tokens`, whose KV is computed and final, while the lease goes on.

        Does nothing unless that brings at least as many pages into the tree as it then holds twice, because it
        has their equals already.
        """
        self._require(lease)
        count = len(tokens) // self.page_size
        if not self.prefix_cache or count <= lease.shared:
            return
        present = self._tree.match(lease.namespace, tokens, count).pages
        if present - lease.shared > count - present:
            return
        node, present = self._tree.insert(lease.namespace, tokens, lease.tables, count)
        self._tree.lock(node)
        self._tree.unlock(lease.node)
        for spare, table in zip(lease.spare, lease.tables, strict=True):
            spare.extend(table[lease.shared : present])
        lease.node, lease.shared = node, count

    def close(self, lease: Lease, tokens: tuple[int, ...]) -> None:
        """End the lease. Full pages of `tokens` (KV computed and final) go to the tree, the rest is freed.

        Raises IntegrityError when the lease was closed before.
        """
        self._require(lease)
        count = len(tokens) // self.page_size
        if count > lease.pages:
            raise IntegrityError(f"a lease of {lease.pages} pages was closed with {count} pages of computed tokens")
        self._leases.remove(lease)
        kept = present = lease.shared
        if self.prefix_cache and count > lease.shared:
            kept = count
            _, present = self._tree.insert(lease.namespace, tokens, lease.tables, count)
            if present < lease.shared:
                raise IntegrityError(f"prefix tree: {lease.shared} pages were locked, only {present} are there")
        private = zip(lease.spare, lease.tables, strict=True)
        self._free([spare + table[lease.shared : present] + table[kept:] for spare, table in private])
        self._tree.unlock(lease.node)

    def flush(self) -> bool:
        """Forget every prefix. False, and nothing done, while leases are open."""
        if self._leases:
            return False
        self._free(self._tree.clear())
        return True

    def counts(self) -> tuple[PageCounts, ...]:
        """Per cache group; `held` is counted from the leases and locks, not by subtraction."""
        tree = self._tree
        held = tree.locked_pages + sum(lease.pages - lease.shared + len(lease.spare[0]) for lease in self._leases)
        return tuple(PageCounts(one.total, one.free_count, tree.unlocked_pages, held) for one in self._allocators)

    def check_integrity(self, deep: bool = False) -> None:
        """Raises IntegrityError with the numbers unless every page is accounted for exactly once.

        The plain check costs a walk over leases; `deep` also recounts the tree and looks at each page id.
        """
        for group, counts in enumerate(self.counts()):
            if counts.free + counts.cached + counts.held != counts.total:
                raise IntegrityError(
                    f"cache group {group}: {counts.free} free + {counts.cached} cached + {counts.held} held"
                    f" != {counts.total} pages"
                )
        if not self._leases and self._tree.locked_pages:
            raise IntegrityError(f"prefix tree: {self._tree.locked_pages} pages are locked, but no lease is open")
        if deep:
            self._tree.check_integrity()
            for allocator in self._allocators:
                self._check_each_page(allocator)

    def _check_each_page(self, allocator: PageAllocator) -> None:
        group = allocator.group
        seen = list(allocator.free_pages())
        for node in self._tree.nodes():
            seen.extend(node.pages[group])
        for lease in self._leases:
            seen.extend(lease.tables[group][lease.shared :] + lease.spare[group])
        if sorted(seen) != list(range(1, allocator.total + 1)):
            twice = sorted(page for page, owners in Counter(seen).items() if owners > 1)
            lost = sorted(set(range(1, allocator.total + 1)) - set(seen))
            raise IntegrityError(f"cache group {group}: pages with two owners {twice}, pages with none {lost}")

    def _require(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise IntegrityError(f"a lease of {lease.pages} pages was used or closed after it had been closed")

    def _free(self, pages: Sequence[Sequence[int]]) -> None:
        for allocator, mine in zip(self._allocators, pages, strict=True):
            allocator.free(mine)
