"""The prefix tree's pages of one sliding-window group: which node has each, and how many leases use it.

Owns the order in which they are evicted, and how far a prefix can be used without those that are missing. A page of a
full-attention group stays in its node until the node is evicted from the tree; a page of a window is also evicted
alone, because only the last ones of a prefix are needed to go on from there. The node then has 0 in its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from srv.errors import IntegrityError
from srv.memory.groups import PageGroup

if TYPE_CHECKING:
    from srv.memory.radix import Node


class WindowPages:
    """The pages of cache group number `group` in a tree of units of `unit` tokens."""

    def __init__(self, group: int, facts: PageGroup, unit: int) -> None:
        self.group = group
        self._facts = facts
        self._unit = unit
        self._ratio = unit // facts.page_size  # pages per unit
        self._nodes: dict[int, Node] = {}
        self._leases: dict[int, int] = {}  # page -> number of leases that use it
        self._unused: OrderedDict[int, None] = OrderedDict()  # pages without leases, the longest unused first

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    @property
    def unused(self) -> int:
        """Number of pages that no lease uses, so that they can be evicted."""
        return len(self._unused)

    def is_unused(self, page: int) -> bool:
        return page in self._unused

    def usable_units(self, present: bytes, units: int) -> int:
        """The largest number of units, at most `units`, after which no page of the window before is missing.

        present: for each page of a path of nodes, whether the tree has it.
        """
        while units:
            first = self._facts.first_needed_page(units * self._unit)
            missing = present.rfind(0, first, units * self._ratio)
            if missing < 0:
                return units
            units = (present.rfind(1, 0, missing) + 1) // self._ratio  # up to the last page before the missing ones
        return 0

    def fill_holes(self, path: Sequence[Node], table: Sequence[int]) -> None:
        """Give the nodes of a path the pages of a lease's table where theirs are missing, as `add` does."""
        begin = 0
        for node in path:
            pages = node.pages[self.group]
            if 0 in pages:
                own_pages = table[begin : begin + len(pages)]
                for place, (page, own_page) in enumerate(zip(pages, own_pages, strict=True)):
                    if not page and own_page and own_page not in self:
                        pages[place] = own_page
                        self.add((own_page,), node)
            begin += len(pages)

    def add(self, pages: Iterable[int], node: Node) -> None:
        """The node takes over pages of the one lease that has them and goes on using them. Ignores 0."""
        for page in pages:
            if page:
                self._nodes[page] = node
                self._leases[page] = 1

    def move(self, pages: Iterable[int], node: Node) -> None:
        """The pages are in another node now. Ignores 0."""
        for page in pages:
            if page:
                self._nodes[page] = node

    def acquire_last(self, table: list[int]) -> None:
        """One lease more uses the pages of the last window of a prefix; those before become 0 in its page table."""
        first = self._facts.first_needed_page(len(table) * self._facts.page_size)
        table[:first] = [0] * first
        for page in table[first:]:
            self._leases[page] += 1
            self._unused.pop(page, None)

    def release(self, page: int) -> None:
        """One lease less uses this page."""
        leases = self._leases[page] - 1
        if leases < 0:
            raise IntegrityError(f"cache group {self.group}: page {page} was released more often than acquired")
        self._leases[page] = leases
        if not leases:
            self._unused[page] = None

    def remove(self, pages: Iterable[int]) -> list[int]:
        """Pages of a node that is being evicted; returns them without 0. Raises IntegrityError if a lease uses one."""
        removed = [page for page in pages if page]
        for page in removed:
            if self._leases[page]:
                raise IntegrityError(
                    f"cache group {self.group}: page {page} was evicted while {self._leases[page]} leases use it"
                )
            self._forget(page)
        return removed

    def evict(self, count: int) -> list[int]:
        """Take the `count` pages that were unused for the longest time (or all of them) out of their nodes."""
        evicted: list[int] = []
        while len(evicted) < count and self._unused:
            page = next(iter(self._unused))
            pages = self._nodes[page].pages[self.group]
            pages[pages.index(page)] = 0
            self._forget(page)
            evicted.append(page)
        return evicted

    def check_integrity(self, nodes: Iterable[Node], used: dict[int, int]) -> None:
        """Raises IntegrityError unless `nodes` have exactly these pages, used by as many leases as `used` says."""
        by_page = {page: node for node in nodes for page in node.pages[self.group] if page}
        if by_page != self._nodes:
            raise IntegrityError(f"cache group {self.group}: pages are in other nodes of the tree than recorded")
        for page, leases in self._leases.items():
            if used.get(page, 0) != leases or (page in self._unused) != (leases == 0):
                raise IntegrityError(
                    f"cache group {self.group}: {used.get(page, 0)} leases use page {page}, recorded are {leases}"
                )

    def _forget(self, page: int) -> None:
        del self._nodes[page], self._leases[page], self._unused[page]
