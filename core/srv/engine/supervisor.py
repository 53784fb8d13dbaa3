"""Starts the engine process, waits until it is ready, monitors it, and stops it.

Owns the child process and the sockets between the two processes. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

from srv.errors import EngineDead, SrvError
from srv.executor.spec import EngineSpec, encode
from srv.io.channel import ApiChannel, SocketDirectory
from srv.io.messages import Ended, FromEngine, LoadFailed, Ready, ToEngine

_POLL_INTERVAL_S = 0.2
_EXIT_TIMEOUT_S = 10.0


class EngineStartError(SrvError):
    """The engine could not start. `lines` are error messages for the operator; `status` is the exit status."""

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
        """Start the process. It imports its modules and waits for `send_spec`."""
        self._process = subprocess.Popen(
            # -P: do not import modules from the current working directory.
            [sys.executable, "-P", "-m", "srv.engine.process"],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def send_spec(self, make_spec: Callable[[str, str], EngineSpec]) -> None:
        """Send the started process the spec of its engine, made by `make_spec(to_engine, from_engine)`."""
        assert self._process is not None
        assert self._process.stdin is not None
        spec = make_spec(self._directory.to_engine, self._directory.from_engine)
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(encode(spec))

    async def ready(self, timeout_s: float) -> Ready:
        """Wait until the engine is ready. Raises EngineStartError if it fails, exits, or exceeds `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self.receive()
        except TimeoutError:
            remedy = "Raise --engine-start-timeout-seconds, or check the log above for what takes so long."
            raise EngineStartError([f"the engine was not ready after {timeout_s:g} seconds. {remedy}"], 1) from None
        except EngineDead as error:
            raise EngineStartError([f"{error} before it was ready; see its log above for the cause"], 1) from None
        if isinstance(message, LoadFailed):
            raise EngineStartError(message.lines, message.status)
        if not isinstance(message, Ready):
            raise EngineStartError([f"the engine sent {type(message).__name__} before it was ready"], 1)
        return message

    async def send(self, message: ToEngine) -> None:
        await self._channel.send(message)

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDead once the process has exited and all its messages have been read, or
        when it announces its end."""
        receiving = asyncio.ensure_future(self._channel.receive())
        try:
            while True:
                exit_status = self._exit_status()
                done, _ = await asyncio.wait({receiving}, timeout=_POLL_INTERVAL_S)
                if done:
                    message = receiving.result()
                    if isinstance(message, Ended):
                        raise EngineDead(f"the engine ended: {message.reason}")
                    return message
                if exit_status is not None:
                    raise EngineDead(f"the engine process ended with {exit_status}")
        finally:
            receiving.cancel()

    def _exit_status(self) -> str | None:
        """The exit status of the process, as "status N" or "signal N"; None while it runs."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        return f"status {code}" if code >= 0 else f"signal {-code}"

    def close(self, *, drained: bool) -> None:
        """Stop the process and remove the sockets. A drained process exits by itself; any other one is killed."""
        if self._process is not None and self._process.poll() is None:
            try:
                self._process.wait(_EXIT_TIMEOUT_S if drained else 0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._channel.close()
        self._directory.close()
