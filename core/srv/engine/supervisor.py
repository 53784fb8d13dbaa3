"""Starts the engine process, waits until it is ready, monitors it, and stops it.

Owns the child process and the sockets between the two processes. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Callable, Mapping

import msgspec

from srv.errors import EngineDead, StartError
from srv.executor.spec import EngineSpec, encode
from srv.io import child
from srv.io.channel import ApiChannel, SocketDirectory
from srv.io.messages import Ended, FromEngine, LoadFailed, Ready, ToEngine

_WORKER_MODULE = "srv.worker.rank"
_POLL_INTERVAL_S = 0.2
_EXIT_TIMEOUT_S = 10.0


class EngineProcess:
    """One engine process and the API process's channel to it. Implements `srv.server.client.Channel`.

    `replica`: the number of the replica that it is.
    """

    def __init__(self, replica: int = 0) -> None:
        self._replica = replica
        self._directory = SocketDirectory()
        self._channel = ApiChannel(self._directory)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Callable[[int], Mapping[str, str]], ranks: int = 1, *, alone: bool = True) -> None:
        """Start the process. It imports its modules and waits for `send_spec`. A single rank runs in it, too.

        `environment`: the variables of a rank, by its number among the ranks of this host. `ranks`: of the engine.
        `alone`: they compute steps without those of other replicas; otherwise even a single one has its own process.
        """
        modules = [_WORKER_MODULE] if ranks == 1 and alone else []
        self._process = child.spawn("srv.engine.process", environment(self._replica * ranks), modules)

    def send_spec(self, make_spec: Callable[[str, str], EngineSpec]) -> None:
        """Send the started process the spec of its engine, made by `make_spec(to_engine, from_engine)`."""
        assert self._process is not None
        spec = make_spec(self._directory.to_engine, self._directory.from_engine)
        child.send(self._process, encode(msgspec.structs.replace(spec, replica=self._replica)))

    async def ready(self, timeout_s: float) -> Ready:
        """Wait until the engine is ready. Raises StartError if it fails, exits, or exceeds `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self.receive()
        except TimeoutError:
            remedy = "Raise --engine-start-timeout-seconds, or check the log above for what takes so long."
            raise StartError([f"the engine was not ready after {timeout_s:g} seconds. {remedy}"], 1) from None
        except EngineDead as error:
            raise StartError([f"{error} before it was ready; see its log above for the cause"], 1) from None
        if isinstance(message, LoadFailed):
            raise StartError(message.lines, message.status)
        if not isinstance(message, Ready):
            raise StartError([f"the engine sent {type(message).__name__} before it was ready"], 1)
        return message

    async def send(self, message: ToEngine) -> None:
        await self._channel.send(message)

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDead once the process has exited and all its messages have been read, or
        when it announces its end."""
        receiving = asyncio.ensure_future(self._channel.receive())
        try:
            while True:
                exit_status = None if self._process is None else child.exit_status(self._process)
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

    def dump_stacks(self) -> None:
        """Let the process log the stacks of its threads, even if its interpreter is stuck (`srv.io.child.begin`)."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the process at once; `receive` then raises EngineDead."""
        if self._process is not None:
            self._process.kill()

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
