"""Places for work of which little runs at a time: owners take turns, and none can fill the queue against another.

Must not know what the work is. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Crowded(Exception):
    """The queue is full, and this owner has no smaller share of it than the others. `waiting`: those of the owner."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        super().__init__(f"{waiting} are waiting")


class FairQueue:
    """`places`: what runs at the same time. `limit`: what may wait."""

    def __init__(self, places: int, limit: int) -> None:
        self._free, self._limit = places, limit
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # whose turn is next comes first

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncGenerator[None, None]:
        """Wait for a place and hold it. Raises Crowded, also later if others with smaller shares arrive."""
        await self._enter(owner)
        try:
            yield
        finally:
            self._leave()

    def close(self) -> None:
        """Cancel whoever waits."""
        for turn in [turn for turns in self._waiting.values() for turn in turns]:
            turn.cancel()

    async def _enter(self, owner: str) -> None:
        if self._free:
            self._free -= 1
            return
        if sum(map(len, self._waiting.values())) >= self._limit:
            self._displace(owner)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # the turn came as this was cancelled
            else:
                self._forget(owner, turn)
            raise

    def _displace(self, owner: str) -> None:
        """Make the largest share smaller by its newest. Raises Crowded if that would not be fairer."""
        largest = max(self._waiting, key=lambda other: len(self._waiting[other]))
        own_count, most = len(self._waiting.get(owner, ())), len(self._waiting[largest])
        if most - own_count < 2:
            raise Crowded(own_count)
        turn = self._waiting[largest][-1]
        self._forget(largest, turn)
        if not turn.done():  # else it is cancelled, and leaves by itself
            turn.set_exception(Crowded(most - 1))

    def _forget(self, owner: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(owner)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]

    def _leave(self) -> None:
        """Give a place to the next owner, which then comes last."""
        while self._waiting:
            owner, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():  # else it is cancelled
                turn.set_result(None)
                return
        self._free += 1
