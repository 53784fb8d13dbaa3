"""Who holds how many slots: the shares of client requests, and of their owners.

Owns the counts, and the choice of who gives a slot up. Must not know the queue, pages or steps.

A client request (`RequestSpec.group`) has one or more sequences, each of which is a `Request` here. An owner
(`RequestSpec.owner`) has one or more client requests. Whoever holds less goes first (max-min fairness): first among
owners, then among the client requests of an owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from srv.sched.request import Claimant, Request, State

Name = TypeVar("Name", str, Claimant)


class Share(NamedTuple):
    """Slots that are held by the owner of a request, and by its client request. The smaller one goes first."""

    owner: int
    group: int


class Shares:
    """Counts slots. `groups`: of each client request that holds one; `owners`: of each owner that holds one.

    `changed`: the client requests whose counts have changed; its reader clears it.
    """

    def __init__(self) -> None:
        self.groups: dict[Claimant, int] = {}
        self.owners: dict[str, int] = {}
        self.changed: dict[Claimant, None] = {}
        self._with_several = 0  # client requests that hold more than one slot

    def of(self, request: Request) -> Share:
        return Share(self.owners.get(request.claimant.owner, 0), self.groups.get(request.claimant, 0))

    @property
    def total(self) -> int:
        return sum(self.groups.values())

    def can_give(self, owners: int) -> bool:
        """Whether anybody may hold more than a fair share. `owners`: how many have requests waiting."""
        return self._with_several > 0 or owners > 1 or len(self.owners) > 1

    def admitted(self, request: Request) -> None:
        self._add(request.claimant, 1)

    def released(self, request: Request) -> None:
        self._add(request.claimant, -1)

    def _add(self, claimant: Claimant, change: int) -> None:
        before = self.groups.get(claimant, 0)
        self._with_several += (before + change > 1) - (before > 1)
        self.changed[claimant] = None
        _count(self.groups, claimant, change)
        _count(self.owners, claimant.owner, change)


class Donors:
    """Chooses requests that give up their slots, one after another, for client requests that hold none.

    The newest sequence of the largest client request is chosen: of the owner that holds most, if it holds at least
    two slots more than the receiver's owner does, otherwise of the receiver's own owner, if that client request holds
    at least two. So nobody gives up its last slot to its equal, and no exchange is ever made the other way round.
    """

    def __init__(self, shares: Shares, running: Iterable[Request]) -> None:
        """`running`: in order of arrival."""
        self._groups, self._owners = dict(shares.groups), dict(shares.owners)
        self._running = [one for one in running if one.state is State.RUNNING]

    def next_for(self, receiver: Request) -> Request | None:
        """The request that gives up its slot for `receiver`; None: nobody holds more than a fair share."""
        owner = receiver.claimant.owner
        count = self._owners.get(owner, 0)
        richest = max(self._owners, key=lambda key: self._owners[key], default=owner)
        from_another = self._owners.get(richest, 0) >= count + 2
        giver = richest if from_another else owner
        candidates = [group for group in self._groups if group.owner == giver]
        largest = max(candidates, key=lambda group: self._groups[group], default=None)
        if largest is None or (self._groups[largest] < 2 and not (from_another and giver != owner)):
            return None
        for index in range(len(self._running) - 1, -1, -1):
            if self._running[index].claimant == largest:
                self._move(largest, -1)
                return self._running.pop(index)
        return None

    def receive(self, receiver: Request) -> None:
        """`receiver` gets the slots that were given up for it."""
        self._move(receiver.claimant, 1)

    def _move(self, claimant: Claimant, change: int) -> None:
        _count(self._groups, claimant, change)
        _count(self._owners, claimant.owner, change)


def newest_of_largest(running: list[Request]) -> Request:
    """Which of the `running` requests, in order of arrival, gives up its pages when they run out.

    The newest sequence of the client request that holds most slots; if none holds several, the newest of all. It is
    never the earliest request of all, unless that one is alone.
    """
    counts: dict[Claimant, int] = {}
    for request in running:
        counts[request.claimant] = counts.get(request.claimant, 0) + 1
    most = max(counts.values())
    if most < 2:
        return running[-1]
    return next(one for one in reversed(running) if counts[one.claimant] == most)


def split_evenly(amount: int, demand: dict[Claimant, int]) -> dict[Claimant, int]:
    """Share `amount` among claimants, none of which gets more than it wants; the smallest amounts are met first."""
    shares: dict[Claimant, int] = {}
    for number, claimant in enumerate(sorted(demand, key=lambda key: demand[key])):
        shares[claimant] = min(demand[claimant], -(-amount // (len(demand) - number)))
        amount -= shares[claimant]
    return shares


def _count(counts: dict[Name, int], name: Name, change: int) -> None:
    count = counts.get(name, 0) + change
    if count:
        counts[name] = count
    else:
        counts.pop(name, None)
