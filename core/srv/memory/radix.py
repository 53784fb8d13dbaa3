"""The prefix tree: which token sequences have their KV in which pages.

Owns the nodes, their lock counts and the order of eviction. Must not know allocators, requests or devices:
pages given in are the tree's until `evict` or `clear` gives them back.

    root ── "" ── (1 2 3 4) pages ((7, 8),) ─┬─ (5 6) pages ((3,),)          page size 2, one cache group
        │                                    └─ (9 9 1 2) pages ((5, 11),)
        └─ "tenant-b" ── (1 2) pages ((4,),)

Only full pages are in the tree, so keys are multiples of the page size and children differ in their first
page, which is what they are found by; below the root they are found by namespace, and a namespace node has
no pages of its own. A lock on a node holds every node up to the root. The idea of a radix tree over KV with
least-recently-used eviction of unlocked leaves is from RadixAttention (Zheng et al. 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from srv.errors import IntegrityError

# When a leaf is larger than what must be evicted, its tail goes and at least this share of it, so that the
# copies that shorten it stay linear in its length.
TRIM_SHARE = 8

Pages = tuple[tuple[int, ...], ...]  # [cache group][page]


@dataclass(frozen=True, slots=True)
class Match:
    """A longest cached prefix, in pages; `unlocked` of them would leave the evictable count when held."""

    pages: int
    unlocked: int


class Node:
    """`label` finds the node below its parent; `key` are its tokens, `pages[group]` their pages."""

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
    """A forest of prefixes, one tree a namespace, for cache groups of one common page size.

    `unlocked_pages` and `locked_pages` count pages of each group. `version` changes whenever the answer
    of `match` may have changed.
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
        """The longest cached prefix of at most `limit` pages. Changes nothing."""
        pages = unlocked = 0
        for node, same in self._walk(namespace, tokens, limit):
            pages += same
            if node.locks == 0:
                unlocked += same
        return Match(pages, unlocked)

    def acquire(self, namespace: str, tokens: tuple[int, ...], limit: int) -> tuple[Node, Pages]:
        """Lock the longest cached prefix of at most `limit` pages; give back with `unlock(node)`."""
        path = self._path(namespace, tokens, limit)
        node = path[-1]
        self.lock(node)
        groups = range(len(self._no_pages))
        return node, tuple(tuple(page for part in path for page in part.pages[group]) for group in groups)

    def insert(
        self, namespace: str, tokens: tuple[int, ...], tables: Sequence[Sequence[int]], count: int
    ) -> tuple[Node, int]:
        """Bring in the first `count` pages of `tokens`, held in `tables[group]`.

        Returns the last node and how many leading pages were in the tree already. The tree now owns
        `tables[group][present:count]`; earlier pages of the caller that differ from the tree's stay the
        caller's. The node is not locked.
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
            self._offer(leaf)
            node = leaf
        return node, present

    def lock(self, node: Node) -> None:
        """Hold a node and all above it against eviction."""
        self.version += 1
        above: Node | None = node
        while above is not None:
            if above.locks == 0:
                self.unlocked_pages -= above.count
                self.locked_pages += above.count
            above.locks += 1
            above = above.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises IntegrityError when there was none."""
        self.version += 1
        above: Node | None = node
        while above is not None:
            if above.locks == 0:
                raise IntegrityError(f"prefix tree: a node of {above.count} pages was unlocked more often than locked")
            above.locks -= 1
            parent = above.parent
            if above.locks == 0:
                self.unlocked_pages += above.count
                self.locked_pages -= above.count
                self._offer(above)
            above = parent

    def evict(self, count: int) -> Pages:
        """Give back at least `count` pages of each group, least recently used first, or all that is unlocked."""
        given: list[list[int]] = [[] for _ in self._no_pages]
        while len(given[0]) < count:
            node = self._least_recently_used()
            if node is None:
                break
            missing = count - len(given[0])
            keep = min(node.count - missing, node.count - node.count // TRIM_SHARE)
            self._cut(node, max(keep, 0), given)
        return tuple(tuple(pages) for pages in given)

    def clear(self) -> Pages:
        """Give back every page. Raises IntegrityError while anything is locked."""
        if self.locked_pages:
            raise IntegrityError(f"prefix tree: cleared while {self.locked_pages} pages are locked")
        return self.evict(self.unlocked_pages)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, for integrity checks."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Recount. Raises IntegrityError with the numbers when the tree contradicts itself."""
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
                    raise IntegrityError("prefix tree: an unlocked leaf is not in the order of eviction")
        if (unlocked, locked) != (self.unlocked_pages, self.locked_pages):
            raise IntegrityError(
                f"prefix tree: recounted {unlocked} unlocked and {locked} locked pages,"
                f" but its counters say {self.unlocked_pages} and {self.locked_pages}"
            )

    def _walk(self, namespace: str, tokens: tuple[int, ...], limit: int) -> Iterator[tuple[Node, int]]:
        """Nodes along `tokens` with the number of leading pages of each that agree; the last may be partial."""
        size = self.page_size
        limit = min(limit, len(tokens) // size)
        node = self._root.children.get(namespace)
        done = 0
        while node is not None and done < limit:
            node = node.children.get(tokens[done * size : (done + 1) * size])
            if node is None:
                return
            same = self._common_pages(node.key, tokens[done * size : (done + min(node.count, limit - done)) * size])
            yield node, same
            if same < node.count:
                return
            done += same

    def _common_pages(self, key: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        """Leading pages in which `key` and `tokens` (not longer, first page equal) agree: halving, no token loop."""
        size = self.page_size
        if key[: len(tokens)] == tokens:
            return len(tokens) // size
        low, high = 1, len(tokens) // size  # pages before `low` agree, some page before `high` differs
        while high - low > 1:
            middle = (low + high) // 2
            if key[low * size : middle * size] == tokens[low * size : middle * size]:
                low = middle
            else:
                high = middle
        return low

    def _path(self, namespace: str, tokens: tuple[int, ...], limit: int) -> list[Node]:
        """Touch and return the nodes along `tokens`, namespace node first, splitting a last partial one."""
        self.version += 1
        self._clock += 1
        steps = list(self._walk(namespace, tokens, limit))
        first = self._root.children.get(namespace)
        if first is None:
            first = Node(self._root, namespace, (), self._no_pages)
            self._root.children[namespace] = first
            self._nodes += 1
        path = [first]
        for node, same in steps:
            path.append(node if same == node.count else self._split(node, same))
        for node in path:
            node.last_used = self._clock
            if not node.locks and not node.children:
                self._offer(node, keep_empty=True)
        return path

    def _split(self, node: Node, count: int) -> Node:
        """Cut a node in two; the lower part stays the same object, since locks name the end of a prefix."""
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

    def _offer(self, node: Node, keep_empty: bool = False) -> None:
        """If the node is an unlocked leaf, enter it in the order of eviction; an empty namespace just goes."""
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

    def _cut(self, node: Node, keep: int, given: list[list[int]]) -> None:
        """Evict the pages of an unlocked leaf behind its first `keep`."""
        self.version += 1
        for group, pages in enumerate(node.pages):
            given[group].extend(pages[keep:])
        self.unlocked_pages -= node.count - keep
        if keep:
            node.key = node.key[: keep * self.page_size]
            node.pages = tuple(pages[:keep] for pages in node.pages)
            node.count = keep
            self._offer(node)
        else:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise IntegrityError("prefix tree: a node was removed twice")
        del parent.children[node.label]
        node.parent = None
        self._nodes -= 1
        self._offer(parent)
