"""Copies of recurrent states at the ends of cached prefixes: which slot has which, and the order of eviction.

A recurrent layer keeps one state per request, whatever its length, so a cached prefix can be continued only from where
a copy of the states was made. These copies, the snapshots, are in slots of their own, after those of running requests:

    free ──take──▶ held by a lease ──put──▶ in a node of the prefix tree
      ▲                  │drop                 │
      └──────────────────┴──evict, remove──────┘

Must not know requests or devices. A slot may be taken again at once: the device copies states in the order of steps.
Nothing locks a snapshot, because a request that continues from one has copied it when its first step begins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from srv.errors import IntegrityError
from srv.memory.tree_nodes import Node


@dataclass(frozen=True, slots=True)
class SnapshotCounts:
    """free + cached (in the prefix tree) + held (by leases) == total."""

    total: int
    free: int
    cached: int
    held: int


class Snapshots:
    """The slots `first` to `first + count - 1`."""

    def __init__(self, first: int, count: int) -> None:
        self.total = count
        self._free = list(range(first + count - 1, first - 1, -1))
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # of the slots in the tree, the longest unused first
        self._held: set[int] = set()

    @property
    def evicts(self) -> bool:
        """Whether `take` would evict a snapshot of the tree."""
        return not self._free and bool(self._nodes)

    def take(self) -> int:
        """A slot for a lease: a free one, or that of the snapshot that was not used for the longest time; 0: none."""
        if self.evicts:
            slot, node = next(iter(self._nodes.items()))
            self.remove(node, [units for units, state in node.states.items() if state == slot])
        if not self._free:
            return 0
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def drop(self, slot: int) -> None:
        """A lease does not need its slot any more."""
        self._release(slot)
        self._free.append(slot)

    def put(self, node: Node, units: int, slot: int) -> None:
        """The slot of a lease has the states after so many units of a node, which keeps the one that it has."""
        if units in node.states:
            self._nodes.move_to_end(node.states[units])
            self.drop(slot)
            return
        self._release(slot)
        node.states[units] = slot
        self._nodes[slot] = node

    def use(self, slot: int) -> None:
        """A request continues from this snapshot."""
        self._nodes.move_to_end(slot)

    def split(self, node: Node, upper: Node) -> None:
        """The first `upper.count` units of a node are those of `upper` now."""
        states, node.states = node.states, {}
        for units, slot in states.items():
            if units <= upper.count:
                upper.states[units] = slot
                self._nodes[slot] = upper
            else:
                node.states[units - upper.count] = slot

    def remove(self, node: Node, ends: Iterable[int]) -> None:
        """Free the snapshots of a node that have the states after these numbers of its units."""
        for units in ends:
            slot = node.states.pop(units)
            del self._nodes[slot]
            self._free.append(slot)

    def counts(self) -> SnapshotCounts:
        return SnapshotCounts(self.total, len(self._free), len(self._nodes), len(self._held))

    def check_integrity(self, held_slots: Iterable[int]) -> None:
        """Raises IntegrityError, with the numbers, unless each slot is in one place and leases hold `held_slots`."""
        counts, slots = self.counts(), sorted(held_slots)
        if counts.free + counts.cached + counts.held != counts.total:
            raise IntegrityError(
                f"snapshots of states: {counts.free} free + {counts.cached} cached + {counts.held} held !="
                f" {counts.total}"
            )
        if slots != sorted(self._held):
            raise IntegrityError(f"snapshots of states: leases hold slots {slots}, recorded are {sorted(self._held)}")

    def check_nodes(self, nodes: Iterable[Node]) -> None:
        """Raises IntegrityError unless `nodes` have exactly the snapshots that are recorded, within their units."""
        by_slot: dict[int, Node] = {}
        for node in nodes:
            for units, slot in node.states.items():
                if not 0 < units <= node.count:
                    raise IntegrityError(f"snapshots of states: slot {slot} is at unit {units} of {node.count}")
                by_slot[slot] = node
        if by_slot != dict(self._nodes):
            raise IntegrityError("snapshots of states: slots are in other nodes of the tree than recorded")

    def _release(self, slot: int) -> None:
        if slot not in self._held:
            raise IntegrityError(f"snapshots of states: no lease holds slot {slot}")
        self._held.remove(slot)


def last_snapshot(path: Iterable[tuple[Node, int]]) -> int:
    """The most units of a path, each node with its number of matching units, after which there is a snapshot."""
    last = begin = 0
    for node, matching in path:
        last = max((begin + units for units in node.states if units <= matching), default=last)
        begin += matching
    return last
