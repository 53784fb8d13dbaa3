"""The KV cache's bookkeeping: the pages of every cache group, the prefix tree over them, and the leases on them.

Owns who holds which page. Must not know requests, steps or devices. Every page is in one of three states:

    free (allocator)  ──extend──▶  private to one lease  ──publish/close──▶  prefix tree
          ▲                              │close                         locked: held   unlocked: cached
          └──────────────────────────────┴──────────────evict───────────────────────────────┘

A lease's page table is `[shared pages | private pages]`. Shared pages belong to the tree and are locked by the
lease. Two leases may compute pages with equal content at the same time. The first one to publish its pages inserts
them into the tree. The other lease keeps its own copies, because a page table is append-only while a request runs:
copies that precede shared pages are its `duplicates`. They are freed when the lease is closed. The tree therefore
never holds the same content twice.
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
    """Page counts of one cache group: free + cached (in the tree, unlocked) + held (by leases) == total."""

    total: int
    free: int
    cached: int
    held: int


class Lease:
    """The pages of one running request: the page tables `tables[group]`; the tree covers their first `shared` pages.

    `duplicates[group]`: those of the first `shared` pages that are the lease's own copies. The tree has pages with
    equal content in their place, which the lease locks as well.
    """

    __slots__ = ("duplicates", "namespace", "node", "shared", "tables")

    def __init__(self, namespace: str, node: Node, tables: tuple[list[int], ...]) -> None:
        self.namespace = namespace
        self.node = node
        self.tables = tables
        self.shared = len(tables[0])
        self.duplicates: tuple[list[int], ...] = tuple([] for _ in tables)

    @property
    def pages(self) -> int:
        return len(self.tables[0])


class Cache:
    """The page bookkeeping of one KV pool. `pages[group]`: usable pages per cache group; all have the same page size.

    If `prefix_cache` is False, no prefix is ever matched or kept.
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
        """Maximum pages of a single lease: the page count of the smallest group."""
        return min(allocator.total for allocator in self._allocators)

    @property
    def available(self) -> int:
        """Pages that can be allocated now in every group, including those that eviction would free."""
        return min(allocator.free_count for allocator in self._allocators) + self._tree.unlocked_pages

    @property
    def version(self) -> int:
        """A number that changes whenever the result of `match` may have changed."""
        return self._tree.version

    @property
    def open_leases(self) -> int:
        return len(self._leases)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def match(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Match:
        """The longest cached prefix, in full pages, within the first `limit` tokens. Has no side effects."""
        if not self.prefix_cache:
            return Match(0, 0)
        return self._tree.match(namespace, tokens, limit // self.page_size)

    def open(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Lease:
        """Open a lease that starts with the prefix that `match` finds, and lock that prefix."""
        node, pages = self._tree.acquire(namespace, tokens, limit // self.page_size if self.prefix_cache else 0)
        lease = Lease(namespace, node, tuple(list(table) for table in pages))
        self._leases.add(lease)
        return lease

    def can_extend(self, lease: Lease, tokens: int) -> bool:
        """Whether `extend` would succeed for the first `tokens` positions."""
        return self.pages_for(tokens) - lease.pages <= self.available

    def extend(self, lease: Lease, tokens: int) -> None:
        """Append pages until they cover the first `tokens` positions, evicting cached prefixes if necessary.

        Raises IntegrityError if `can_extend` is False.
        """
        missing = self.pages_for(tokens) - lease.pages
        if missing <= 0:
            return
        self._check_open(lease)
        shortage = missing - min(allocator.free_count for allocator in self._allocators)
        if shortage > 0:
            self._free(self._tree.evict(shortage))
        for table, allocator in zip(lease.tables, self._allocators, strict=True):
            table.extend(allocator.allocate(missing))

    def publish(self, lease: Lease, tokens: tuple[int, ...]) -> None:
        """Insert the full pages of `tokens`, whose KV is computed and final, into the tree; the lease stays open.

        Does nothing if it would turn more of the lease's pages into duplicates than it adds to the tree.
        """
        self._check_open(lease)
        count = len(tokens) // self.page_size
        if not self.prefix_cache or count <= lease.shared:
            return
        present = self._tree.match(lease.namespace, tokens, count).pages
        if present - lease.shared > count - present:
            return
        node, present = self._tree.insert(lease.namespace, tokens, lease.tables, count)
        self._tree.lock(node)
        self._tree.unlock(lease.node)
        for duplicates, table in zip(lease.duplicates, lease.tables, strict=True):
            duplicates.extend(table[lease.shared : present])
        lease.node, lease.shared = node, count

    def close(self, lease: Lease, tokens: tuple[int, ...]) -> None:
        """Close the lease. Full pages of `tokens` (KV computed and final) go to the tree; the other pages are freed.

        Raises IntegrityError if the lease is already closed.
        """
        self._check_open(lease)
        count = len(tokens) // self.page_size
        if count > lease.pages:
            raise IntegrityError(f"a lease of {lease.pages} pages was closed with {count} pages of computed tokens")
        self._leases.remove(lease)
        kept = present = lease.shared
        if self.prefix_cache and count > lease.shared:
            kept = count
            _, present = self._tree.insert(lease.namespace, tokens, lease.tables, count)
            if present < lease.shared:
                raise IntegrityError(f"prefix tree: {lease.shared} pages were locked, but the tree has only {present}")
        tables = zip(lease.duplicates, lease.tables, strict=True)
        self._free([duplicates + table[lease.shared : present] + table[kept:] for duplicates, table in tables])
        self._tree.unlock(lease.node)

    def flush(self) -> bool:
        """Clear the prefix tree. Returns False and does nothing while leases are open."""
        if self._leases:
            return False
        self._free(self._tree.clear())
        return True

    def counts(self) -> tuple[PageCounts, ...]:
        """Page counts per cache group. `held` is counted from leases and locks, not derived from the other counts."""
        tree = self._tree
        held = tree.locked_pages + sum(lease.pages - lease.shared + len(lease.duplicates[0]) for lease in self._leases)
        return tuple(PageCounts(each.total, each.free_count, tree.unlocked_pages, held) for each in self._allocators)

    def check_integrity(self, deep: bool = False) -> None:
        """Raises IntegrityError, with the counts, unless every page is accounted for exactly once.

        The cost is linear in the number of leases; `deep` also recounts the tree and checks every page id.
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
            seen.extend(lease.tables[group][lease.shared :] + lease.duplicates[group])
        if sorted(seen) != list(range(1, allocator.total + 1)):
            duplicated = sorted(page for page, owners in Counter(seen).items() if owners > 1)
            lost = sorted(set(range(1, allocator.total + 1)) - set(seen))
            raise IntegrityError(f"cache group {group}: pages with two owners {duplicated}, pages with none {lost}")

    def _check_open(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise IntegrityError(f"a lease of {lease.pages} pages was used or closed after it had been closed")

    def _free(self, pages: Sequence[Sequence[int]]) -> None:
        for allocator, group_pages in zip(self._allocators, pages, strict=True):
            allocator.free(group_pages)
