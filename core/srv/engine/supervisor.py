"""Starts the engine process, waits until it is ready, watches it, and ends it.

Owns the child process and the sockets between the two. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

from srv.engine.spec import EngineSpec, encode
from srv.errors import EngineDead, SrvError
from srv.io.channel import ApiChannel, SocketDirectory
from srv.io.messages import FromEngine, LoadFailed, Ready, ToEngine

_POLL_S = 0.2
_END_S = 10.0


class EngineStartError(SrvError):
    """The engine could not start. `lines` are for the operator; `status` is the exit status."""

    def __init__(self, lines: list[str], status: int) -> None:
        self.lines, self.status = lines, status
        super().__init__("\n".join(lines))


class EngineProcess:
    """One engine process and the API process's channel to it. Implements `srv.server.client.Channel`."""

    def __init__(self) -> None:
        self._directory = SocketDirectory()
        self._channel = ApiChannel(self._directory)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process. It imports what it is made of, and waits to be told what to serve."""
        self._process = subprocess.Popen(
            # -P: the folder that srv was started in is no place to import from.
            [sys.executable, "-P", "-m", "srv.engine.process"],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def tell(self, make_spec: Callable[[str, str], EngineSpec]) -> None:
        """Have the started process build its engine; `make_spec(to_engine, from_engine)` describes it."""
        assert self._process is not None
        assert self._process.stdin is not None
        spec = make_spec(self._directory.to_engine, self._directory.from_engine)
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(encode(spec))

    async def ready(self, timeout_s: float) -> Ready:
        """Wait until the engine serves. Raises EngineStartError with what it said, or why it said nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self.receive()
        except TimeoutError:
            remedy = "Raise --engine-start-timeout-seconds, or look at the log above for what takes so long."
            raise EngineStartError([f"the engine was not ready after {timeout_s:g} seconds. {remedy}"], 1) from None
        except EngineDead as error:
            raise EngineStartError([f"{error} before it was ready; its log above says why"], 1) from None
        if isinstance(message, LoadFailed):
            raise EngineStartError(message.lines, message.status)
        if not isinstance(message, Ready):
            raise EngineStartError([f"the engine said {type(message).__name__} before it was ready"], 1)
        return message

    async def send(self, message: ToEngine) -> None:
        await self._channel.send(message)

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDead once the process has ended and nothing is left to read."""
        waiting = asyncio.ensure_future(self._channel.receive())
        try:
            while True:
                ended = self._status()
                done, _ = await asyncio.wait({waiting}, timeout=_POLL_S)
                if done:
                    return waiting.result()
                if ended is not None:
                    raise EngineDead(f"the engine process ended with {ended}")
        finally:
            waiting.cancel()

    def _status(self) -> str | None:
        """How the process ended, in words; None while it runs."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        return f"status {code}" if code >= 0 else f"signal {-code}"

    def close(self, *, drained: bool) -> None:
        """End the process, and remove the sockets. One that has drained ends by itself; it is waited for."""
        if self._process is not None and self._process.poll() is None:
            try:
                self._process.wait(_END_S if drained else 0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._channel.close()
        self._directory.close()
