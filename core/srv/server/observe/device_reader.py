"""Reads the sensors of the devices for a scrape of `/metrics`. Must not know what reads them.

A driver may take long to answer, or hang. So each read has a thread of its own, which is never waited for longer than
`SECONDS`, and never beside an earlier one that has not ended: a scrape is then answered without the devices' gauges.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from srv.platform.sensors import Reading, Readings

SECONDS = 0.5
logger = logging.getLogger(__name__)


class DeviceReader:
    """`read`: returns the readings, or raises; None if the platform has no sensors."""

    def __init__(self, read: Callable[[], Readings] | None, seconds: float = SECONDS) -> None:
        self._read, self._seconds = read, seconds
        self._thread: threading.Thread | None = None
        self._warned = False

    async def devices(self) -> Sequence[Reading]:
        """The devices' readings now; none if they cannot be read in time. Call it on one event loop."""
        if self._read is None or (self._thread is not None and self._thread.is_alive()):
            return ()
        answer: asyncio.Future[Readings | Exception] = asyncio.get_running_loop().create_future()
        # A daemon: a driver that hangs must not keep this process from ending.
        self._thread = threading.Thread(target=self._run, args=(self._read, answer), name="sensors", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(self._seconds):
                readings = await answer
        except TimeoutError:
            return self._warn(f"they did not answer within {self._seconds:g} s")
        if isinstance(readings, Exception):
            return self._warn(f"{type(readings).__name__}: {readings}")
        return readings.devices or (self._warn(readings.missing) if readings.missing else ())

    @staticmethod
    def _run(read: Callable[[], Readings], answer: asyncio.Future[Readings | Exception]) -> None:
        result: Readings | Exception
        try:
            result = read()
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything; it is logged
            result = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            answer.get_loop().call_soon_threadsafe(_set, answer, result)

    def _warn(self, reason: str) -> Sequence[Reading]:
        """Log, once, why the gauges are missing."""
        if not self._warned:
            logger.warning("/metrics has no sensors of the devices: %s", reason)
        self._warned = True
        return ()


def _set(answer: asyncio.Future[Readings | Exception], result: Readings | Exception) -> None:
    if not answer.done():  # it is cancelled after a timeout
        answer.set_result(result)
