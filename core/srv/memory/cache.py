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

In a sliding-window group, a lease gives back the pages behind its window (`trim`), and its table has 0 in their place.
There, the tree counts the leases of each page, not of each node (`srv.memory.window_pages`): a page that no lease uses
is cached, and evicted alone if the group runs out of pages.

With recurrent layers, a prefix can be continued only where the tree has a snapshot of their states, and a lease holds
the snapshots of its own prefix until the tree has its pages (`srv.memory.snapshots`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from srv.errors import IntegrityError
from srv.memory.groups import PageGroup, max_tokens
from srv.memory.pages import PageAllocator
from srv.memory.radix import Match, Node, Pages, RadixTree
from srv.memory.snapshots import SnapshotCounts, Snapshots


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Page counts of one cache group: free + cached (in the tree, unlocked) + held (by leases) == total."""

    total: int
    free: int
    cached: int
    held: int


class Lease:
    """The pages of one running request: the page tables `tables[group]`, for its first `capacity` positions.

    The tree covers the first `shared` units. `duplicates[group]`: those of their pages that are the lease's own copies;
    the tree has pages with equal content in their place, which the lease locks as well. `trimmed[group]`: how many
    leading pages of a sliding-window group were given back. `restored`: the slot of the snapshot from which it goes on,
    or 0. `saved`: the slots of its own snapshots that the tree does not have, by their units.
    """

    __slots__ = ("capacity", "duplicates", "namespace", "node", "restored", "saved", "shared", "tables", "trimmed")

    def __init__(self, namespace: str, node: Node, tables: tuple[list[int], ...], units: int, tokens: int) -> None:
        self.namespace = namespace
        self.node = node
        self.tables = tables
        self.shared = units
        self.capacity = tokens
        self.duplicates: tuple[list[int], ...] = tuple([] for _ in tables)
        self.trimmed = [0] * len(tables)
        self.restored = 0
        self.saved: dict[int, int] = {}

    @property
    def held(self) -> list[int]:
        """Pages of each group in the tables."""
        return [len(table) - trimmed for table, trimmed in zip(self.tables, self.trimmed, strict=True)]


class Cache:
    """The page bookkeeping of the KV pools of `groups`.

    If `prefix_cache` is False, no prefix is ever matched or kept. `unconfirmed`: the most tokens of one request whose
    steps are in flight (`trim` needs confirmed ones). `snapshots`: the slots for snapshots of recurrent states; None
    for a model without such layers. With no slots, no prefix could be continued, so none is kept. `saves_states`: a
    prefix can only be shared where recurrent states were saved (`save`).
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        prefix_cache: bool = True,
        unconfirmed: int = 1,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.prefix_cache = prefix_cache and (snapshots is None or snapshots.total > 0)
        self.saves_states = snapshots is not None and self.prefix_cache
        self._unconfirmed = unconfirmed
        self._allocators = tuple(PageAllocator(number, group.pages) for number, group in enumerate(groups))
        self._tree = RadixTree(groups, snapshots)
        self._snapshots = snapshots
        self._most_pages = tuple(group.most_pages(self._tree.unit, unconfirmed) for group in groups)
        self._windows = self._tree.windows
        self._leases: set[Lease] = set()
        self.no_pages: Pages = ((),) * len(self._allocators)

    @property
    def unit(self) -> int:
        """Tokens in the unit in which prefixes are shared."""
        return self._tree.unit

    @property
    def has_windows(self) -> bool:
        """Whether leases have to be trimmed."""
        return bool(self._windows)

    @property
    def max_tokens(self) -> int | None:
        """Maximum positions of a single lease; None if it never holds more than its windows."""
        return max_tokens(self.groups, self._unconfirmed)

    @property
    def available(self) -> tuple[int, ...]:
        """Pages that can be allocated now in each group, including those that eviction would free."""
        return tuple([self._available(number) for number in range(len(self.groups))])

    def _available(self, group: int) -> int:
        window = self._windows.get(group)
        evictable = self._tree.unlocked * self._tree.ratios[group] if window is None else window.unused
        return self._allocators[group].free_count + evictable

    @property
    def version(self) -> int:
        """A number that changes whenever the result of `match` may have changed."""
        return self._tree.version

    @property
    def open_leases(self) -> int:
        return len(self._leases)

    def match(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Match:
        """The longest cached prefix, in full units, within the first `limit` tokens. Has no side effects."""
        return self._tree.match(namespace, tokens, limit // self.unit if self.prefix_cache else 0)

    def open(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Lease:
        """Open a lease that starts with the prefix that `match` finds, and lock that prefix."""
        node, tables = self._tree.acquire(namespace, tokens, limit // self.unit if self.prefix_cache else 0)
        units = len(tables[0]) // self._tree.ratios[0]
        lease = Lease(namespace, node, tables, units, units * self.unit)
        lease.trimmed = [group.first_needed_page(lease.capacity) for group in self.groups]
        if self._snapshots is not None:
            lease.restored = self._tree.snapshot(node)
        self._leases.add(lease)
        return lease

    def places_to_save(self, lease: Lease, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The positions within `tokens`, ascending, at which the lease should save its recurrent states.

        They are where others left this prefix, so that the next one can go on from there; and the end of the last whole
        unit, without the last token, since a request with the same tokens has to compute that one. Where the tree has a
        snapshot, none is saved: a request whose hit is limited computes such places again.
        """
        if not self.saves_states:
            return ()
        last = (len(tokens) - 1) // self.unit
        branch = self._tree.present(lease.namespace, tokens, last)
        missing = [
            units
            for units in sorted({branch, last})
            if units > lease.shared and self._tree.last_snapshot(lease.namespace, tokens, units) < units
        ]
        return tuple([units * self.unit for units in missing])

    def save(self, lease: Lease, position: int, replaces: int) -> int:
        """A slot for the recurrent states at a position, the end of a unit; 0 if none is free.

        A lease gives up what it has saved at position `replaces`, or after it, and the tree does not have.
        """
        slot = next((lease.saved.pop(units) for units in tuple(lease.saved) if units * self.unit >= replaces), 0)
        slot = slot or self._tree.take_snapshot()
        if slot:
            lease.saved[position // self.unit] = slot
        return slot

    def growth(self, lease: Lease | Match, tokens: int) -> list[int]:
        """Pages of each group that a lease, or one on a prefix hit, needs at most to grow to `tokens` positions."""
        missing: list[int] = []
        for group, most, count, behind in zip(self.groups, self._most_pages, lease.held, lease.trimmed, strict=True):
            needed = group.pages_for(tokens) - behind
            missing.append(max(0, (needed if most is None or most > needed else most) - count))
        return missing

    def can_extend(self, lease: Lease, tokens: int) -> bool:
        """Whether `extend` would succeed for the first `tokens` positions."""
        for number, group in enumerate(self.groups):
            if group.pages_for(tokens) - len(lease.tables[number]) > self._available(number):
                return False
        return True

    def extend(self, lease: Lease, tokens: int) -> None:
        """Append pages until they cover the first `tokens` positions, evicting cached prefixes if necessary.

        Raises IntegrityError if `can_extend` is False.
        """
        if tokens <= lease.capacity:
            return
        self._check_open(lease)
        missing = [group.pages_for(tokens) - len(table) for group, table in zip(self.groups, lease.tables, strict=True)]
        self._evict(missing)
        for table, allocator, count in zip(lease.tables, self._allocators, missing, strict=True):
            table.extend(allocator.allocate(count))
        lease.capacity = min(
            len(table) * group.page_size for group, table in zip(self.groups, lease.tables, strict=True)
        )

    def trim(self, lease: Lease, position: int) -> None:
        """Give back the pages of sliding-window groups that no token at `position`, or after it, needs.

        What the first token after the last whole unit needs is kept, so that the tree can continue from there.
        """
        position = position // self.unit * self.unit
        for number in self._windows:
            table, begin = lease.tables[number], lease.trimmed[number]
            end = min(self.groups[number].first_needed_page(position), len(table))
            if end > begin:
                self._give_back(number, table[begin:end])
                table[begin:end] = [0] * (end - begin)
                lease.trimmed[number] = end

    def publish(self, lease: Lease, tokens: tuple[int, ...]) -> None:
        """Insert the full units of `tokens`, whose KV is computed and final, into the tree; the lease stays open.

        Does nothing if it would turn more of the lease's pages into duplicates than it adds to the tree.
        """
        self._check_open(lease)
        count = len(tokens) // self.unit
        if self.prefix_cache and count > lease.shared:
            self._publish(lease, tokens, count)
        if lease.saved:
            self._share_snapshots(lease, tokens)

    def _publish(self, lease: Lease, tokens: tuple[int, ...], count: int) -> None:
        present = self._tree.present(lease.namespace, tokens, count)
        if present - lease.shared > count - present:
            return
        node, present = self._tree.insert(lease.namespace, tokens, lease.tables, count)
        self._tree.lock(node)
        self._tree.unlock(lease.node)
        for number, (duplicates, table) in enumerate(zip(lease.duplicates, lease.tables, strict=True)):
            if number not in self._windows:
                ratio = self._tree.ratios[number]
                duplicates.extend(table[lease.shared * ratio : present * ratio])
        lease.node, lease.shared = node, count

    def close(self, lease: Lease, tokens: tuple[int, ...]) -> None:
        """Close the lease. Full units of `tokens` (KV computed and final) go to the tree; the other pages are freed.

        Raises IntegrityError if the lease is already closed.
        """
        self._check_open(lease)
        count = len(tokens) // self.unit
        if count * self.unit > lease.capacity:
            raise IntegrityError(
                f"a lease of {lease.capacity} positions was closed with {count * self.unit} computed tokens"
            )
        self._leases.remove(lease)
        end = present = lease.shared
        if self.prefix_cache and count > lease.shared:
            end = count
            _, present = self._tree.insert(lease.namespace, tokens, lease.tables, count)
            if present < lease.shared:
                raise IntegrityError(f"prefix tree: {lease.shared} units were locked, but the tree has only {present}")
        for number, (duplicates, table) in enumerate(zip(lease.duplicates, lease.tables, strict=True)):
            if number in self._windows:
                self._give_back(number, table[lease.trimmed[number] :])
            else:
                ratio = self._tree.ratios[number]
                own_pages = table[lease.shared * ratio : present * ratio] + table[end * ratio :]
                self._allocators[number].free(duplicates + own_pages)
        if lease.saved:
            self._share_snapshots(lease, tokens)
        if self._snapshots is not None:
            for slot in lease.saved.values():
                self._snapshots.drop(slot)
        self._tree.unlock(lease.node)

    def _share_snapshots(self, lease: Lease, tokens: tuple[int, ...]) -> None:
        """Give the tree the snapshots within `tokens` of whose prefixes it has the pages."""
        for units, slot in tuple(lease.saved.items()):
            if units <= len(tokens) // self.unit and self._tree.put_snapshot(lease.namespace, tokens, units, slot):
                del lease.saved[units]

    def flush(self) -> bool:
        """Clear the prefix tree. Returns False and does nothing while leases are open."""
        if self._leases:
            return False
        self._free(self._tree.clear())
        return True

    def counts(self) -> tuple[PageCounts, ...]:
        """Page counts per cache group. `held` is counted from leases and locks, not derived from the other counts."""
        return tuple([self._counts(number) for number in range(len(self.groups))])

    def _counts(self, number: int) -> PageCounts:
        tree, allocator = self._tree, self._allocators[number]
        window, ratio = self._windows.get(number), tree.ratios[number]
        if window is not None:
            used = {page for lease in self._leases for page in lease.tables[number][lease.trimmed[number] :]}
            return PageCounts(allocator.total, allocator.free_count, window.unused, len(used))
        held = tree.locked * ratio + sum(
            len(lease.tables[number]) - lease.shared * ratio + len(lease.duplicates[number]) for lease in self._leases
        )
        return PageCounts(allocator.total, allocator.free_count, tree.unlocked * ratio, held)

    def snapshot_counts(self) -> SnapshotCounts:
        """Counts of the slots for snapshots; all 0 for a model without recurrent layers."""
        return SnapshotCounts(0, 0, 0, 0) if self._snapshots is None else self._snapshots.counts()

    def check_integrity(self, deep: bool = False) -> None:
        """Raises IntegrityError, with the counts, unless every page is accounted for exactly once.

        The cost is linear in the number of leases (and their pages in windows); `deep` also recounts the tree and
        checks every page id.
        """
        for group, counts in enumerate(self.counts()):
            if counts.free + counts.cached + counts.held != counts.total:
                raise IntegrityError(
                    f"cache group {group}: {counts.free} free + {counts.cached} cached + {counts.held} held"
                    f" != {counts.total} pages"
                )
        if not self._leases and self._tree.locked:
            raise IntegrityError(f"prefix tree: {self._tree.locked} units are locked, but no lease is open")
        if self._snapshots is not None:
            self._snapshots.check_integrity(slot for lease in self._leases for slot in lease.saved.values())
        if deep:
            if self._snapshots is not None:
                self._snapshots.check_nodes(self._tree.nodes())
            self._tree.check_integrity()
            for allocator in self._allocators:
                self._check_each_page(allocator)

    def _check_each_page(self, allocator: PageAllocator) -> None:
        group = allocator.group
        window, ratio = self._windows.get(group), self._tree.ratios[group]
        owned = [page for node in self._tree.nodes() for page in node.pages[group] if page]
        if window is not None:
            tables = [lease.tables[group][lease.trimmed[group] :] for lease in self._leases]
            shared = Counter(page for table in tables for page in table if page in window)
            window.check_integrity(self._tree.nodes(), shared)
            private = [page for table in tables for page in table if page not in window]
        else:
            tables = [lease.tables[group][lease.shared * ratio :] + lease.duplicates[group] for lease in self._leases]
            private = [page for table in tables for page in table]
        pages = [*allocator.free_pages(), *owned, *private]
        if sorted(pages) != list(range(1, allocator.total + 1)):
            duplicated = sorted(page for page, owners in Counter(pages).items() if owners > 1)
            lost = sorted(set(range(1, allocator.total + 1)) - set(pages))
            raise IntegrityError(f"cache group {group}: pages with two owners {duplicated}, pages with none {lost}")

    def _check_open(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise IntegrityError(f"a lease of {lease.capacity} positions was used or closed after it had been closed")

    def _evict(self, missing: Sequence[int]) -> None:
        """Evict cached pages until `missing[group]` pages are free in each group, or none is left to evict."""
        shortages = [count - allocator.free_count for count, allocator in zip(missing, self._allocators, strict=True)]
        units = max(
            -(-shortage // ratio) if number not in self._windows else 0
            for number, (shortage, ratio) in enumerate(zip(shortages, self._tree.ratios, strict=True))
        )
        if units > 0:
            self._free(self._tree.evict(units))
        for number in self._windows:
            shortage = missing[number] - self._allocators[number].free_count
            if shortage > 0:
                self._allocators[number].free(self._tree.evict_window(number, shortage))

    def _give_back(self, number: int, pages: Sequence[int]) -> None:
        """A lease does not use these pages of a sliding-window group any more."""
        window = self._windows[number]
        for page in pages:
            if page in window:
                self._tree.release_window(number, page)
            else:
                self._allocators[number].free((page,))

    def _free(self, pages: Sequence[Sequence[int]]) -> None:
        for allocator, group_pages in zip(self._allocators, pages, strict=True):
            allocator.free(group_pages)
