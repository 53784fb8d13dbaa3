"""The nodes of the prefix tree, and what looking up a prefix returns."""

from __future__ import annotations

from dataclasses import dataclass

Pages = tuple[tuple[int, ...], ...]  # [cache group][page]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix, in units and tokens.

    held[group]: the pages that a lease on it would hold; trimmed[group]: those before them, which it would not need.
    unlocked[group]: how many of the held ones can be evicted now; holding the prefix prevents that.
    """

    units: int
    tokens: int
    held: tuple[int, ...]
    trimmed: tuple[int, ...]
    unlocked: tuple[int, ...]


class Node:
    """`label`: the node's key in `parent.children`. `key`: its tokens, `count` units of them.

    `pages[group]`: the pages with their KV; 0 in a sliding-window group where a page was not needed any more.
    `states`: by a number of its units, the slot with the recurrent states after that many (`srv.memory.snapshots`).
    """

    __slots__ = ("children", "count", "key", "label", "last_used", "locks", "pages", "parent", "states")

    def __init__(
        self,
        parent: Node | None,
        label: str | tuple[int, ...],
        key: tuple[int, ...],
        count: int,
        pages: tuple[list[int], ...],
    ) -> None:
        self.parent = parent
        self.label = label
        self.key = key
        self.count = count
        self.pages = pages
        self.states: dict[int, int] = {}
        self.children: dict[str | tuple[int, ...], Node] = {}
        self.locks = 0
        self.last_used = 0
