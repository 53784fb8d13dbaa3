"""Which connections a server keeps when clients open more than its limit.

    ordinary places: --max-connections       reserved places: RESERVED, for probes only, when the others are taken

Whoever comes to a full server takes the place of a connection that occupies it without a request, if there is one.
Must not know HTTP.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Protocol

RESERVED = 64
IDLE_SECONDS = 5.0  # after which a connection that had a request may lose its place


class Place(Enum):
    ORDINARY = "ordinary"
    RESERVED = "reserved"
    NONE = "none"  # the server closes the connection at once


class Connection(Protocol):
    """address: of its client. idle_since: for how long it has been without a request (monotonic seconds), None while it
    has one. served: whether it had one before."""

    @property
    def address(self) -> str: ...

    idle_since: float | None
    served: bool

    def evict(self) -> None: ...


class Places:
    """All connections of a server. `limit`: of the ordinary places."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ordinary: dict[Connection, None] = {}
        self._reserved: dict[Connection, None] = {}

    def take(self, connection: Connection, now: float) -> Place:
        """Find a place for a new connection."""
        for place, taken, limit in (
            (Place.ORDINARY, self._ordinary, self._limit),
            (Place.RESERVED, self._reserved, RESERVED),
        ):
            if len(taken) >= limit and (least := _least(taken, now)) is not None:
                del taken[least]
                least.evict()
            if len(taken) < limit:
                taken[connection] = None
                return place
        return Place.NONE

    def leave(self, connection: Connection) -> None:
        self._ordinary.pop(connection, None)
        self._reserved.pop(connection, None)


def _least(taken: dict[Connection, None], now: float) -> Connection | None:
    """The connection that loses its place first: one of the address with most of those that have never sent a request,
    the one that has waited longest. If there is none, the one that has been idle longest."""
    silent = [each for each in taken if each.idle_since is not None and not each.served]
    if silent:
        counts = Counter(each.address for each in silent)
        (address, _) = counts.most_common(1)[0]
        return next(each for each in silent if each.address == address)  # they are in order of arrival
    idle = [(each.idle_since, each) for each in taken if each.idle_since is not None]
    since, longest = min(idle, key=lambda pair: pair[0], default=(now, None))
    return longest if now - since >= IDLE_SECONDS else None
