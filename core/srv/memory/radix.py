"""The radix tree of cached prefixes: which pages hold the KV of which token sequences.

Owns the nodes, their lock counts and the order of eviction. Must not know allocators, requests or devices: inserted
pages belong to the tree until `evict`, `evict_window` or `clear` returns them.

    root ── "" ── (1 2 3 4) pages ([7, 8],) ─┬─ (5 6) pages ([3],)           units of 2 tokens, one cache group
        │                                    └─ (9 9 1 2) pages ([5, 11],)
        └─ "tenant-b" ── (1 2) pages ([4],)

A prefix is cached in units: the tokens of whole pages of every cache group, so the length of a key is a multiple of the
unit. Children differ in their first unit and are looked up by its tokens; below the root they are looked up by
namespace, and a namespace node has no pages of its own. A lock on a node protects it and all its ancestors. The idea of
a radix tree over KV with least-recently-used eviction of unlocked leaves is from RadixAttention (Zheng et al. 2024).

In a sliding-window group, a node may have 0 in place of a page: only the pages of a prefix's last window are needed to
go on from there, so a prefix matches as far as these are present (`WindowPages`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from srv.errors import IntegrityError
from srv.memory.groups import PageGroup, shared_unit
from srv.memory.snapshots import Snapshots, last_snapshot
from srv.memory.tree_nodes import Match as Match
from srv.memory.tree_nodes import Node as Node
from srv.memory.tree_nodes import Pages as Pages
from srv.memory.window_pages import WindowPages

# If a leaf has more units than must be evicted, only its tail is evicted, but at least 1 / MIN_EVICTED_DIVISOR of the
# leaf: each eviction copies the remaining key, and this keeps the total cost linear in the length of the key.
MIN_EVICTED_DIVISOR = 8


class RadixTree:
    """Cached prefixes, one tree per namespace, for the pages of `groups`.

    `unit`: tokens per unit. `ratios[group]`: pages per unit. `unlocked` and `locked` count units. `windows[group]`: the
    pages of sliding-window groups. `version` changes whenever the result of `match` may have changed. `snapshots`: of
    recurrent states, if the model has them: a prefix then matches up to the last snapshot in it.
    """

    def __init__(self, groups: Sequence[PageGroup], snapshots: Snapshots | None = None) -> None:
        self.snapshots = snapshots
        self.unit = shared_unit(groups)
        self.ratios = tuple(self.unit // group.page_size for group in groups)
        self.windows = {
            number: WindowPages(number, group, self.unit) for number, group in enumerate(groups) if group.window
        }
        self.unlocked = 0
        self.locked = 0
        self.version = 0
        self._groups = tuple(groups)
        self._root = self._empty_node(None, "")
        self._clock = 0
        self._pushed = 0
        self._nodes = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (last used, tie-break, node); may hold stale entries

    def match(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Match:
        """The longest cached prefix of at most `limit` units from which a request can go on. Has no side effects."""
        path = list(self._walk(namespace, tokens, limit))
        units = sum(matching for _, matching in path)
        if self.windows:
            match = self._match_windows(path, units)
        else:
            unlocked = sum(matching for node, matching in path if not node.locks)
            counts, free = (tuple([count * ratio for ratio in self.ratios]) for count in (units, unlocked))
            match = Match(units, units * self.unit, counts, (0,) * len(counts), free)
        if self.snapshots is None:
            return match
        last = self.last_snapshot(namespace, tokens, match.units)
        return match if last == match.units else self.match(namespace, tokens, last)

    def last_snapshot(self, namespace: str, tokens: tuple[int, ...], limit: int) -> int:
        """The most units, at most `limit`, of a cached prefix after which there is a snapshot, if one is needed."""
        return limit if self.snapshots is None else last_snapshot(self._walk(namespace, tokens, limit))

    def present(self, namespace: str, tokens: tuple[int, ...], limit: int) -> int:
        """Units of the longest prefix in the tree, whether or not a lease could go on from its end."""
        return sum(matching for _, matching in self._walk(namespace, tokens, limit))

    def _match_windows(self, path: list[tuple[Node, int]], units: int) -> Match:
        """The longest part of a path of `units` units whose last window is present in every sliding-window group."""
        tables = {
            group: [page for node, matching in path for page in node.pages[group][: matching * self.ratios[group]]]
            for group in self.windows
        }
        present = {group: bytes(map(bool, table)) for group, table in tables.items()}
        shortened = True
        while shortened and units:
            shortened = False
            for group, mask in present.items():
                usable = self.windows[group].usable_units(mask, units)
                shortened |= usable < units
                units = usable
        locked, begin = 0, 0
        for node, matching in path:
            if node.locks:
                locked += min(matching, units - begin)
            begin += matching
            if begin >= units:
                break
        trimmed = [group.first_needed_page(units * self.unit) for group in self._groups]
        ends = [units * ratio for ratio in self.ratios]
        unlocked = [(units - locked) * ratio for ratio in self.ratios]
        for group, window in self.windows.items():
            unlocked[group] = sum(map(window.is_unused, tables[group][trimmed[group] : ends[group]]))
        held = tuple(end - begin for begin, end in zip(trimmed, ends, strict=True))
        return Match(units, units * self.unit, held, tuple(trimmed), tuple(unlocked))

    def acquire(self, namespace: str, tokens: tuple[int, ...], limit: int) -> tuple[Node, tuple[list[int], ...]]:
        """Lock the longest cached prefix of at most `limit` units; `unlock(node)` releases it.

        Returns its last node and its page tables. In a sliding-window group, the pages of the last window are acquired
        from `windows[group]` and must be released there one by one; 0 takes the place of those before.
        """
        if self.windows or self.snapshots is not None:
            limit = self.match(namespace, tokens, limit).units
        path = self._path(namespace, tokens, limit)
        self.lock(path[-1])
        tables = tuple([page for part in path for page in part.pages[group]] for group in range(len(self._groups)))
        for group, window in self.windows.items():
            window.acquire_last(tables[group])
        return path[-1], tables

    def snapshot(self, node: Node) -> int:
        """The slot with the states at the end of a node that `acquire` returned; 0 at the beginning, or without any."""
        if self.snapshots is None or not node.count:
            return 0
        slot = node.states[node.count]
        self.snapshots.use(slot)
        return slot

    def take_snapshot(self) -> int:
        """A slot for the states of a lease, perhaps that of a cached prefix; 0 if there is none."""
        if self.snapshots is None:
            return 0
        if self.snapshots.evicts:
            self.version += 1
        return self.snapshots.take()

    def put_snapshot(self, namespace: str, tokens: tuple[int, ...], units: int, slot: int) -> bool:
        """The slot has the states after so many units. False, and nothing is done, if the tree lacks one of them."""
        path = list(self._walk(namespace, tokens, units))
        if self.snapshots is None or sum(matching for _, matching in path) < units:
            return False
        self.version += 1
        node, matching = path[-1]
        self.snapshots.put(node, matching, slot)
        return True

    def insert(
        self, namespace: str, tokens: tuple[int, ...], tables: Sequence[Sequence[int]], count: int
    ) -> tuple[Node, int]:
        """Insert the first `count` units of `tokens`; `tables[group]` are the page tables of the caller's lease.

        Returns the last node and `present`, the number of leading units that the tree already had. The tree takes
        ownership of the pages of the units after these; the caller keeps those of its earlier pages that are not the
        tree's. The node is not locked. In a sliding-window group, the tree also takes ownership of pages that are
        missing in those leading units, and the caller goes on using, and must release, all that the tree takes.
        """
        path = self._path(namespace, tokens, count)
        node, present = path[-1], sum(part.count for part in path)
        for group, window in self.windows.items():
            window.fill_holes(path, tables[group])
        if present < count:
            key = tokens[present * self.unit : count * self.unit]
            pages = tuple(
                list(table[present * ratio : count * ratio]) for table, ratio in zip(tables, self.ratios, strict=True)
            )
            leaf = Node(node, key[: self.unit], key, count - present, pages)
            leaf.last_used = self._clock
            node.children[leaf.label] = leaf
            self._nodes += 1
            self.unlocked += leaf.count
            for group, window in self.windows.items():
                window.add(leaf.pages[group], leaf)
            self._push_evictable(leaf)
            node = leaf
        return node, present

    def lock(self, node: Node) -> None:
        """Protect a node and all its ancestors from eviction."""
        self.version += 1
        current: Node | None = node
        while current is not None:
            if current.locks == 0:
                self.unlocked -= current.count
                self.locked += current.count
            current.locks += 1
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises IntegrityError if the node is not locked."""
        self.version += 1
        current: Node | None = node
        while current is not None:
            if current.locks == 0:
                raise IntegrityError(f"prefix tree: a node of {current.count} units was unlocked but not locked")
            current.locks -= 1
            parent = current.parent
            if current.locks == 0:
                self.unlocked += current.count
                self.locked -= current.count
                self._push_evictable(current)
            current = parent

    def evict(self, count: int) -> Pages:
        """Evict at least `count` units, least recently used first (or all unlocked ones); returns their pages."""
        evicted: tuple[list[int], ...] = tuple([] for _ in self._groups)
        while count > 0 and (node := self._least_recently_used()) is not None:
            keep = max(min(node.count - count, node.count - node.count // MIN_EVICTED_DIVISOR), 0)
            count -= node.count - keep
            self._truncate(node, keep, evicted)
        return tuple(map(tuple, evicted))

    def evict_window(self, group: int, count: int) -> list[int]:
        """Evict at least `count` pages of a sliding-window group alone, or all unused ones if fewer."""
        self.version += 1
        return self.windows[group].evict(count)

    def release_window(self, group: int, page: int) -> None:
        """One lease less uses this page of a sliding-window group."""
        self.version += 1
        self.windows[group].release(page)

    def clear(self) -> Pages:
        """Evict every page. Raises IntegrityError while any unit is locked."""
        if self.locked:
            raise IntegrityError(f"prefix tree: cleared while {self.locked} units are locked")
        return self.evict(self.unlocked)

    def nodes(self) -> Iterator[Node]:
        """Every node except the root, for integrity checks."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Recount all units. Raises IntegrityError, with the numbers, if the tree is inconsistent."""
        unlocked = locked = 0
        evictable = {id(node) for used, _, node in self._leaves if used == node.last_used}
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(node.label) is not node:
                raise IntegrityError("prefix tree: a node is not its parent's child")
            counts = [node.count * ratio for ratio in self.ratios]
            if len(node.key) != node.count * self.unit or [len(pages) for pages in node.pages] != counts:
                raise IntegrityError(f"prefix tree: a node has {len(node.key)} tokens for {node.count} units")
            if sum(child.locks for child in node.children.values()) > node.locks:
                raise IntegrityError("prefix tree: a node is locked less often than its children together")
            if node.locks:
                locked += node.count
            else:
                unlocked += node.count
                if not node.children and id(node) not in evictable:
                    raise IntegrityError("prefix tree: an unlocked leaf is missing from the eviction heap")
        if (unlocked, locked) != (self.unlocked, self.locked):
            raise IntegrityError(
                f"prefix tree: recounted {unlocked} unlocked and {locked} locked units,"
                f" but its counters say {self.unlocked} and {self.locked}"
            )

    def _walk(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Iterator[tuple[Node, int]]:
        """Nodes along `tokens`, each with its number of matching leading units; the last one may match partially."""
        size = self.unit
        limit = min(limit, len(tokens) // size)
        node = self._root.children.get(namespace)
        matched = 0
        while node is not None and matched < limit:
            node = node.children.get(tokens[matched * size : (matched + 1) * size])
            if node is None:
                return
            end = matched + min(node.count, limit - matched)
            matching = self._common_units(node.key, tokens[matched * size : end * size])
            yield node, matching
            if matching < node.count:
                return
            matched += matching

    def _common_units(self, key: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        """Number of equal leading units of `key` and `tokens`. Bisects with slice comparisons, no token loop.

        `tokens` is not longer than `key`, and their first units are equal.
        """
        size = self.unit
        if key[: len(tokens)] == tokens:
            return len(tokens) // size
        low, high = 1, len(tokens) // size  # units before `low` are equal; some unit before `high` differs
        while high - low > 1:
            middle = (low + high) // 2
            if key[low * size : middle * size] == tokens[low * size : middle * size]:
                low = middle
            else:
                high = middle
        return low

    def _path(self, namespace: str, tokens: tuple[int, ...], limit: int) -> list[Node]:
        """The nodes along `tokens`, namespace node first. Marks them as used and splits a partially matching node."""
        self.version += 1
        self._clock += 1
        matches = list(self._walk(namespace, tokens, limit))
        first = self._root.children.get(namespace)
        if first is None:
            first = self._empty_node(self._root, namespace)
            self._root.children[namespace] = first
            self._nodes += 1
        path = [first]
        for node, matching in matches:
            path.append(node if matching == node.count else self._split(node, matching))
        for node in path:
            node.last_used = self._clock
            if not node.locks and not node.children:
                self._push_evictable(node, keep_empty=True)
        return path

    def _split(self, node: Node, count: int) -> Node:
        """Split a node in two. The lower part stays the same object, because a lock refers to the end of a prefix."""
        unit, parent = self.unit, node.parent
        if parent is None:
            raise IntegrityError("prefix tree: the root cannot be split")
        pages = tuple(pages[: count * ratio] for pages, ratio in zip(node.pages, self.ratios, strict=True))
        upper = Node(parent, node.label, node.key[: count * unit], count, pages)
        upper.locks = node.locks
        parent.children[node.label] = upper
        node.key = node.key[count * unit :]
        node.pages = tuple(pages[count * ratio :] for pages, ratio in zip(node.pages, self.ratios, strict=True))
        node.count -= count
        node.label = node.key[:unit]
        node.parent = upper
        upper.children[node.label] = node
        for group, window in self.windows.items():
            window.move(upper.pages[group], upper)
        if self.snapshots is not None:
            self.snapshots.split(node, upper)
        self._nodes += 1
        return upper

    def _empty_node(self, parent: Node | None, label: str) -> Node:
        return Node(parent, label, (), 0, tuple([] for _ in self._groups))

    def _push_evictable(self, node: Node, keep_empty: bool = False) -> None:
        """Push the node on the eviction heap if it is an unlocked leaf; an empty namespace node is removed instead."""
        if node.children or node.locks or node.parent is None:
            return
        if node.count == 0:
            if not keep_empty:
                self._remove(node)
            return
        if len(self._leaves) > 2 * self._nodes + 64:
            self._leaves = [(used, order, leaf) for used, order, leaf in self._leaves if self._is_current(used, leaf)]
            heapq.heapify(self._leaves)
        self._pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._pushed, node))

    def _is_current(self, used: int, node: Node) -> bool:
        return node.last_used == used and not node.locks and not node.children and node.parent is not None

    def _least_recently_used(self) -> Node | None:
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if self._is_current(used, node):
                return node
        return None

    def _truncate(self, node: Node, keep: int, evicted: Sequence[list[int]]) -> None:
        """Evict all units of an unlocked leaf except its first `keep`, and append their pages to `evicted`."""
        self.version += 1
        for group, (pages, ratio) in enumerate(zip(node.pages, self.ratios, strict=True)):
            removed = pages[keep * ratio :]
            evicted[group].extend(self.windows[group].remove(removed) if group in self.windows else removed)
        if self.snapshots is not None:
            self.snapshots.remove(node, [units for units in node.states if units > keep])
        self.unlocked -= node.count - keep
        if keep:
            node.key = node.key[: keep * self.unit]
            node.pages = tuple(pages[: keep * ratio] for pages, ratio in zip(node.pages, self.ratios, strict=True))
            node.count = keep
            self._push_evictable(node)
        else:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise IntegrityError("prefix tree: a node was removed twice")
        del parent.children[node.label]
        node.parent = None
        self._nodes -= 1
        self._push_evictable(parent)
