"""Notices an engine that hangs: one that runs, but from which no message has come for a while.

The engine sends statistics every second from the loop that also runs its steps, so that silence means that a step, or
whatever the loop does, has not ended. The API process counts it, because a hung engine may hold its interpreter's lock.
Must not know how the engine is ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from srv.server.client import EngineClient
from srv.server.lifecycle import Lifecycle

log = logging.getLogger(__name__)
_TICKS = 8  # per limit
DUMP_SECONDS = 1.0  # for a hung engine to log its stacks before it is ended


@dataclass(frozen=True, slots=True)
class WatchdogLimits:
    """Seconds of silence: after `soft` the server counts as unhealthy, after `hard` the engine is ended."""

    soft: float
    hard: float


class Watchdog:
    """Watches one engine while `run` runs. dump: makes the engine log the stacks of its threads. end: ends it."""

    def __init__(
        self,
        client: EngineClient,
        lifecycle: Lifecycle,
        limits: WatchdogLimits,
        dump: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._client, self._lifecycle, self._limits = client, lifecycle, limits
        self._dump, self._end = dump, end

    async def run(self) -> None:
        """Watch until the engine is gone or was ended."""
        tick = min(self._limits.soft, self._limits.hard, 8.0) / _TICKS
        last_received, silent = self._client.received, 0.0
        while self._client.alive:
            await asyncio.sleep(tick)
            # Ticks are counted instead of a clock: if this process was stopped, the engine was not silent so long.
            silent = silent + tick if self._client.received == last_received else 0.0
            last_received = self._client.received
            if silent >= self._limits.hard:
                await self._end_hung()
                return
            self._judge(silent)

    async def _end_hung(self) -> None:
        log.error("the engine has hung for %g s (watchdog_timeout) and is ended", self._limits.hard)
        if not self._lifecycle.hung:  # the soft limit is not lower, so that no stacks have been logged
            self._lifecycle.hung = True
            self._dump()
            await asyncio.sleep(DUMP_SECONDS)
        self._end()

    def _judge(self, silent: float) -> None:
        hung = silent >= self._limits.soft
        if hung and not self._lifecycle.hung:
            log.error(
                "the engine has sent nothing for %g s (soft_watchdog_timeout): the server is unhealthy until it"
                " does, and the engine logs the stacks of its threads",
                self._limits.soft,
            )
            self._dump()
        elif self._lifecycle.hung and not hung:
            log.warning("the engine answers again")
        self._lifecycle.hung = hung
