"""Keeps waiting requests sorted by the shares of their owners and client requests, at a cost per change, not per step.

Owns the sorting. Must not know policies: requests with equal shares are in order of arrival, retracted ones first.

    heap of owners            (slots of the owner, key of its first client request)
      └ heap of client requests   (slots of the client request, retracted or not, arrival of its first sequence)
          └ sequences             in order of arrival, retracted ones first
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, KeysView
from typing import Generic, TypeVar

from srv.sched.request import Claimant, Request
from srv.sched.shares import Shares

Name = TypeVar("Name", str, Claimant)
_MIN_REBUILT = 64  # entries of a heap


class _Ranking(Generic[Name]):
    """Names by ascending keys. A changed key leaves its old entry in the heap, which is dropped when it comes up."""

    def __init__(self) -> None:
        self.keys: dict[Name, tuple[int, ...]] = {}
        self._heap: list[tuple[tuple[int, ...], Name]] = []

    def set(self, name: Name, key: tuple[int, ...] | None) -> None:
        """Place a name, or remove it (None)."""
        if key is None:
            self.keys.pop(name, None)
        elif self.keys.get(name) != key:
            self.keys[name] = key
            heapq.heappush(self._heap, (key, name))
            if len(self._heap) > max(_MIN_REBUILT, 2 * len(self.keys)):
                self._heap = [(position, of) for of, position in self.keys.items()]
                heapq.heapify(self._heap)

    def first(self) -> Name | None:
        while self._heap:
            key, name = self._heap[0]
            if self.keys.get(name) == key:
                return name
            heapq.heappop(self._heap)
        return None


class FairOrder:
    """The waiting requests in fair order. `shares`: who holds how many slots; its changes are followed."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._sequences: dict[Claimant, OrderedDict[str, Request]] = {}
        self._groups: dict[str, _Ranking[Claimant]] = {}  # of each owner
        self._owners: _Ranking[str] = _Ranking()
        self._not_started: dict[Claimant, None] = {}
        self._stale: dict[Claimant, None] = {}  # claimants whose place must be found again
        self._passed: dict[Claimant, None] = {}  # claimants that `walk` has left behind

    @property
    def owners(self) -> int:
        """The number of owners with waiting requests."""
        self._refresh()
        return len(self._groups)

    def head(self, claimant: Claimant) -> Request:
        return next(iter(self._sequences[claimant].values()))

    def waits(self, claimant: Claimant) -> bool:
        return claimant in self._sequences

    def not_started(self) -> KeysView[Claimant]:
        """The claimants that hold no slot."""
        self._refresh()
        return self._not_started.keys()

    def push(self, request: Request, first: bool = False) -> None:
        sequences = self._sequences.setdefault(request.claimant, OrderedDict())
        sequences[request.id] = request
        if first:
            sequences.move_to_end(request.id, last=False)
        if first or len(sequences) == 1:
            self._stale[request.claimant] = None

    def remove(self, request: Request) -> None:
        sequences = self._sequences[request.claimant]
        del sequences[request.id]
        if not sequences:
            del self._sequences[request.claimant]
        self._stale[request.claimant] = None

    def restart(self) -> None:
        """`walk` begins with the first request again."""
        self._stale |= self._passed
        self._passed.clear()

    def walk(self) -> Iterator[Request]:
        """The requests in order, from the first claimant that no walk since `restart` has left behind."""
        self._refresh()
        while (owner := self._owners.first()) is not None:
            claimant = self._groups[owner].first()
            assert claimant is not None  # an owner without claimants has no place
            yield from self._sequences[claimant].values()
            self._passed[claimant] = None
            self._place(claimant, None)

    def _refresh(self) -> None:
        """Find the places of claimants whose requests or shares have changed."""
        changed = self._shares.changed
        if changed:
            self._stale |= changed
            changed.clear()
        while self._stale:
            claimant = next(iter(self._stale))
            del self._stale[claimant]
            sequences = self._sequences.get(claimant)
            running = self._shares.groups.get(claimant, 0)
            if sequences is None or running:
                self._not_started.pop(claimant, None)
            else:
                self._not_started[claimant] = None
            if sequences is None:
                self._passed.pop(claimant, None)
                self._place(claimant, None)
            elif claimant in self._passed:
                self._place_owner(claimant.owner)
            else:
                head = next(iter(sequences.values()))
                self._place(claimant, (running, 0 if head.retractions else 1, head.arrival))

    def _place(self, claimant: Claimant, key: tuple[int, ...] | None) -> None:
        groups = self._groups.get(claimant.owner)
        if groups is None:
            if key is None:
                return
            groups = self._groups[claimant.owner] = _Ranking()
        groups.set(claimant, key)
        self._place_owner(claimant.owner)

    def _place_owner(self, owner: str) -> None:
        groups = self._groups.get(owner)
        first = None if groups is None else groups.first()
        if groups is None or first is None:
            self._owners.set(owner, None)
            self._groups.pop(owner, None)
        else:
            self._owners.set(owner, (self._shares.owners.get(owner, 0), *groups.keys[first]))
