"""Graceful shutdown: after a signal new requests are refused, and running ones finish or end with an error."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from types import FrameType

import uvicorn

from srv.server.lifecycle import Lifecycle

logger = logging.getLogger(__name__)


class GracefulServer(uvicorn.Server):
    """uvicorn, but the first signal drains before the listener closes; a second one aborts running requests.

    drop: ends the work for requests that have not reached the engine, once those that have are done.
    """

    def __init__(
        self, config: uvicorn.Config, lifecycle: Lifecycle, grace_seconds: float, drop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._drop = drop
        self._lifecycle = lifecycle
        self._grace_seconds = grace_seconds
        self._draining: asyncio.Task[None] | None = None
        self.engine_lost = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        # uvicorn handles SIGINT and SIGTERM. SIGHUP, of a terminal that is closed, must not end requests either; nohup
        # sets it to be ignored, which stays so.
        hang_up = signal.getsignal(signal.SIGHUP)
        if hang_up != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            await super().serve(sockets)  # type: ignore[arg-type]
            await self._lifecycle.settle()
        finally:
            signal.signal(signal.SIGHUP, hang_up)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal handler that uvicorn installs, on the main thread."""
        if self._loop is None:
            super().handle_exit(sig, frame)
        elif self._lifecycle.draining:
            self._loop.call_soon_threadsafe(self._lifecycle.abort, None)  # all responses end, then the drain ends
        else:
            self._lifecycle.begin_drain()
            self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        logger.info(
            "stopping: %d requests are running and have %g s to finish", self._lifecycle.active, self._grace_seconds
        )
        self._draining = asyncio.ensure_future(self._drain())

    def lose_engine(self) -> None:
        """Stop the server because the engine has exited, so that a supervisor restarts it. Responses end with errors.

        Does nothing during a shutdown, when the engine is expected to exit.
        """
        if not self._lifecycle.draining:
            self._drop()
            self.engine_lost = self.should_exit = True

    async def _drain(self) -> None:
        try:
            await self._lifecycle.drain(self._grace_seconds)
        finally:
            self._drop()
            self.should_exit = True
