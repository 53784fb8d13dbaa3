"""Which connections a server keeps when clients open more than its limit.

    ordinary places: --max-connections       reserved places: RESERVED, for probes only, when the others are taken

Whoever comes to a full server takes the place of a connection from which no request was accepted, or else of one that
waits for its next request. Must not know HTTP, or keys.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Protocol

RESERVED = 64
IDLE_SECONDS = 5.0  # after which a connection with an accepted request may lose its place to any other


class BytePlace(Enum):
    ORDINARY = "ordinary"
    RESERVED = "reserved"
    NONE = "none"  # the server closes the connection at once


class Connection(Protocol):
    """address: of its client. since: when it was opened, or its latest request began or ended (monotonic seconds).
    waiting: whether it has no request now. accepted: whether it has had a request of a client: with a valid key, if the
    server needs one."""

    @property
    def address(self) -> str: ...

    since: float
    waiting: bool
    accepted: bool

    def evict(self) -> None: ...


class Places:
    """All connections of a server. `limit`: of the ordinary places."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ordinary: dict[Connection, None] = {}
        self._reserved: dict[Connection, None] = {}

    def take(self, connection: Connection, now: float) -> BytePlace:
        """Find a place for a new connection."""
        for place, connections, limit in (
            (BytePlace.ORDINARY, self._ordinary, self._limit),
            (BytePlace.RESERVED, self._reserved, RESERVED),
        ):
            if len(connections) >= limit:
                least = _stranger(connections) or _idle(connections, connection.address, now)
                if least is not None:
                    del connections[least]
                    least.evict()
            if len(connections) < limit:
                connections[connection] = None
                return place
        return BytePlace.NONE

    def leave(self, connection: Connection) -> None:
        self._ordinary.pop(connection, None)
        self._reserved.pop(connection, None)


def _stranger(connections: dict[Connection, None]) -> Connection | None:
    """The connection that loses its place first: one from which no request was accepted, of the address with most of
    those, and there the one whose state is oldest. The only one of its address stays while it has a request: it may be
    a probe, which needs no key."""
    strangers = [connection for connection in connections if not connection.accepted]
    counts = Counter(stranger.address for stranger in strangers)
    leaving = (stranger for stranger in strangers if stranger.waiting or counts[stranger.address] > 1)
    return min(leaving, key=lambda stranger: (-counts[stranger.address], stranger.since), default=None)


def _idle(connections: dict[Connection, None], address: str, now: float) -> Connection | None:
    """The one that loses its place if there are no strangers: it waits for a request, and its address has most of
    those. Before `IDLE_SECONDS` have passed, its client may be sending one; then it stays, unless its address has more
    of them than the newcomer's will have."""
    waiting = [connection for connection in connections if connection.accepted and connection.waiting]
    counts = Counter(connection.address for connection in waiting)
    leaving = (
        connection
        for connection in waiting
        if now - connection.since >= IDLE_SECONDS or counts[connection.address] > counts[address] + 1
    )
    return min(leaving, key=lambda connection: (-counts[connection.address], connection.since), default=None)
