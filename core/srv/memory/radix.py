"""The radix tree of cached prefixes: which pages hold the KV of which token sequences.

Owns the nodes, their lock counts and the order of eviction. Must not know allocators, requests or devices: inserted
pages belong to the tree until `evict` or `clear` returns them.

    root ── "" ── (1 2 3 4) pages ((7, 8),) ─┬─ (5 6) pages ((3,),)          page size 2, one cache group
        │                                    └─ (9 9 1 2) pages ((5, 11),)
        └─ "tenant-b" ── (1 2) pages ((4,),)

Only full pages are in the tree, so the length of a key is a multiple of the page size. Children differ in their first
page and are looked up by its tokens; below the root they are looked up by namespace, and a namespace node has no
pages of its own. A lock on a node protects it and all its ancestors. The idea of a radix tree over KV with
least-recently-used eviction of unlocked leaves is from RadixAttention (Zheng et al. 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from srv.errors import IntegrityError

# If a leaf has more pages than must be evicted, only its tail is evicted, but at least 1 / MIN_EVICTED_DIVISOR of the
# leaf: each eviction copies the remaining key, and this keeps the total cost linear in the length of the key.
MIN_EVICTED_DIVISOR = 8

Pages = tuple[tuple[int, ...], ...]  # [cache group][page]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix, in pages. `unlocked` of them can be evicted now; locking the prefix prevents that."""

    pages: int
    unlocked: int


class Node:
    """`label`: the node's key in `parent.children`. `key`: its tokens. `pages[group]`: the pages with their KV."""

    __slots__ = ("children", "count", "key", "label", "last_used", "locks", "pages", "parent")

    def __init__(self, parent: Node | None, label: str | tuple[int, ...], key: tuple[int, ...], pages: Pages) -> None:
        self.parent = parent
        self.label = label
        self.key = key
        self.pages = pages
        self.count = len(pages[0])
        self.children: dict[str | tuple[int, ...], Node] = {}
        self.locks = 0
        self.last_used = 0


class RadixTree:
    """Cached prefixes, one tree per namespace, for cache groups with the same page size.

    `unlocked_pages` and `locked_pages` are page counts per group. `version` changes whenever the result of `match`
    may have changed.
    """

    def __init__(self, page_size: int, groups: int) -> None:
        self.page_size = page_size
        self.unlocked_pages = 0
        self.locked_pages = 0
        self.version = 0
        self._no_pages: Pages = ((),) * groups
        self._root = Node(None, "", (), self._no_pages)
        self._clock = 0
        self._pushed = 0
        self._nodes = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (last used, tie-break, node); may hold stale entries

    def match(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Match:
        """The longest cached prefix of at most `limit` pages. Has no side effects."""
        pages = unlocked = 0
        for node, matching in self._walk(namespace, tokens, limit):
            pages += matching
            if node.locks == 0:
                unlocked += matching
        return Match(pages, unlocked)

    def acquire(self, namespace: str, tokens: tuple[int, ...], limit: int) -> tuple[Node, Pages]:
        """Lock the longest cached prefix of at most `limit` pages; `unlock(node)` releases it."""
        path = self._path(namespace, tokens, limit)
        node = path[-1]
        self.lock(node)
        groups = range(len(self._no_pages))
        return node, tuple(tuple(page for part in path for page in part.pages[group]) for group in groups)

    def insert(
        self, namespace: str, tokens: tuple[int, ...], tables: Sequence[Sequence[int]], count: int
    ) -> tuple[Node, int]:
        """Insert the first `count` pages of `tokens`; `tables[group]` are the caller's page tables.

        Returns the last node and `present`, the number of leading pages that the tree already had. The tree takes
        ownership of `tables[group][present:count]`; the caller keeps those of its earlier pages that are not the
        tree's. The node is not locked.
        """
        path = self._path(namespace, tokens, count)
        node = path[-1]
        present = sum(part.count for part in path)
        if present < count:
            size = self.page_size
            key = tokens[present * size : count * size]
            pages = tuple(tuple(table[present:count]) for table in tables)
            leaf = Node(node, key[:size], key, pages)
            leaf.last_used = self._clock
            node.children[leaf.label] = leaf
            self._nodes += 1
            self.unlocked_pages += leaf.count
            self._push_evictable(leaf)
            node = leaf
        return node, present

    def lock(self, node: Node) -> None:
        """Protect a node and all its ancestors from eviction."""
        self.version += 1
        current: Node | None = node
        while current is not None:
            if current.locks == 0:
                self.unlocked_pages -= current.count
                self.locked_pages += current.count
            current.locks += 1
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises IntegrityError if the node is not locked."""
        self.version += 1
        current: Node | None = node
        while current is not None:
            if current.locks == 0:
                raise IntegrityError(
                    f"prefix tree: a node of {current.count} pages was unlocked more often than locked"
                )
            current.locks -= 1
            parent = current.parent
            if current.locks == 0:
                self.unlocked_pages += current.count
                self.locked_pages -= current.count
                self._push_evictable(current)
            current = parent

    def evict(self, count: int) -> Pages:
        """Evict at least `count` pages of each group, least recently used first, or all unlocked pages if fewer."""
        evicted: list[list[int]] = [[] for _ in self._no_pages]
        while len(evicted[0]) < count:
            node = self._least_recently_used()
            if node is None:
                break
            missing = count - len(evicted[0])
            keep = min(node.count - missing, node.count - node.count // MIN_EVICTED_DIVISOR)
            self._truncate(node, max(keep, 0), evicted)
        return tuple(tuple(pages) for pages in evicted)

    def clear(self) -> Pages:
        """Evict every page. Raises IntegrityError while any page is locked."""
        if self.locked_pages:
            raise IntegrityError(f"prefix tree: cleared while {self.locked_pages} pages are locked")
        return self.evict(self.unlocked_pages)

    def nodes(self) -> Iterator[Node]:
        """Every node except the root, for integrity checks."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Recount all pages. Raises IntegrityError, with the numbers, if the tree is inconsistent."""
        unlocked = locked = 0
        evictable = {id(node) for used, _, node in self._leaves if used == node.last_used}
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(node.label) is not node:
                raise IntegrityError("prefix tree: a node is not its parent's child")
            if len(node.key) != node.count * self.page_size or any(len(pages) != node.count for pages in node.pages):
                raise IntegrityError(f"prefix tree: a node has {len(node.key)} tokens for {node.count} pages")
            if sum(child.locks for child in node.children.values()) > node.locks:
                raise IntegrityError("prefix tree: a node is locked less often than its children together")
            if node.locks:
                locked += node.count
            else:
                unlocked += node.count
                if not node.children and id(node) not in evictable:
                    raise IntegrityError("prefix tree: an unlocked leaf is missing from the eviction heap")
        if (unlocked, locked) != (self.unlocked_pages, self.locked_pages):
            raise IntegrityError(
                f"prefix tree: recounted {unlocked} unlocked and {locked} locked pages,"
                f" but its counters say {self.unlocked_pages} and {self.locked_pages}"
            )

    def _walk(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Iterator[tuple[Node, int]]:
        """Nodes along `tokens`, each with its number of matching leading pages; the last one may match partially."""
        size = self.page_size
        limit = min(limit, len(tokens) // size)
        node = self._root.children.get(namespace)
        matched = 0
        while node is not None and matched < limit:
            node = node.children.get(tokens[matched * size : (matched + 1) * size])
            if node is None:
                return
            matching = self._common_pages(
                node.key, tokens[matched * size : (matched + min(node.count, limit - matched)) * size]
            )
            yield node, matching
            if matching < node.count:
                return
            matched += matching

    def _common_pages(self, key: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        """Number of equal leading pages of `key` and `tokens`. Bisects with slice comparisons, no token loop.

        `tokens` is not longer than `key`, and their first pages are equal.
        """
        size = self.page_size
        if key[: len(tokens)] == tokens:
            return len(tokens) // size
        low, high = 1, len(tokens) // size  # pages before `low` are equal; some page before `high` differs
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
            first = Node(self._root, namespace, (), self._no_pages)
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
        size, parent = self.page_size, node.parent
        if parent is None:
            raise IntegrityError("prefix tree: the root cannot be split")
        upper = Node(parent, node.label, node.key[: count * size], tuple(pages[:count] for pages in node.pages))
        upper.locks = node.locks
        parent.children[node.label] = upper
        node.key = node.key[count * size :]
        node.pages = tuple(pages[count:] for pages in node.pages)
        node.count -= count
        node.label = node.key[:size]
        node.parent = upper
        upper.children[node.label] = node
        self._nodes += 1
        return upper

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

    def _truncate(self, node: Node, keep: int, evicted: list[list[int]]) -> None:
        """Evict all pages of an unlocked leaf except its first `keep`, and append them to `evicted`."""
        self.version += 1
        for group, pages in enumerate(node.pages):
            evicted[group].extend(pages[keep:])
        self.unlocked_pages -= node.count - keep
        if keep:
            node.key = node.key[: keep * self.page_size]
            node.pages = tuple(pages[:keep] for pages in node.pages)
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
