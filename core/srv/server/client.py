"""The API process's end of the line to the engine: one demultiplexer, one inbox a request.

Owns which requests wait for outputs and what happens to them when the caller or the engine goes away.
Must not know HTTP, text or protocols, nor how messages travel (`Channel`).

    generate() --RequestSpec/Abort/Finish--> outbox --run()--> Channel.send
    generate() <-------- inbox <--------------- run() <---- Channel.receive
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from srv.errors import EngineDead, RequestError
from srv.io.messages import (
    Abort,
    Drain,
    Drained,
    Finish,
    FlushCache,
    Flushed,
    FromEngine,
    GetStats,
    LoadFailed,
    Output,
    Outputs,
    Ready,
    Stats,
    ToEngine,
)
from srv.types import RequestSpec

log = logging.getLogger(__name__)
DRAIN_MARGIN_SECONDS = 5.0  # beyond the grace period: the time the engine gets to say Drained


class Channel(Protocol):
    """Carries messages to and from one engine, in order, each way. `receive` raises EngineDead at the end."""

    async def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine: ...


class _Inbox:
    """Outputs of one request that wait for their reader. One reader; one wake-up for any number of puts."""

    __slots__ = ("_failure", "_outputs", "_waiter")

    def __init__(self) -> None:
        self._outputs: deque[Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failure: EngineDead | None = None

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self._wake()

    def fail(self, failure: EngineDead) -> None:
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Output:
        """The next output; what arrived before a failure is handed out before it is raised."""
        while not self._outputs:
            if self._failure is not None:
                raise EngineDead(str(self._failure))
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()


class EngineClient:
    """Talks to one engine. Every method belongs to the event loop that runs `run()`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outbox: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._inboxes: dict[str, _Inbox] = {}
        self._calls: dict[int, asyncio.Future[Stats | Flushed]] = {}
        self._next_call = 0
        self._drained: asyncio.Future[Drained] | None = None
        self._failure: EngineDead | None = None
        self.latest_stats: Stats | None = None
        self.ready: Ready | None = None

    # ---- life -------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._failure is None

    @property
    def waiting(self) -> int:
        """Requests whose last output has not come yet."""
        return len(self._inboxes)

    def check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDead(str(self._failure))

    def fail(self, failure: EngineDead) -> None:
        """The engine is gone: every waiting request and call fails with `failure`. The first call counts."""
        if self._failure is not None:
            return
        self._failure = failure
        for inbox in self._inboxes.values():
            inbox.fail(failure)
        self._inboxes.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(str(failure)))
        self._calls.clear()
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(EngineDead(str(failure)))

    async def run(self) -> None:
        """Carry messages both ways until the engine is gone; then return. Run it as one task."""
        sender = asyncio.create_task(self._send_all())
        sender.add_done_callback(self._sender_ended)
        try:
            while self.alive:
                self._dispatch(await self._channel.receive())
        except EngineDead as error:
            if self.alive:
                log.error("the engine is gone: %s", error)
            self.fail(error)
        except BaseException as error:
            self.fail(EngineDead(f"the connection to the engine ended: {type(error).__name__}: {error}"))
            raise
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send_all(self) -> None:
        while True:
            await self._channel.send(await self._outbox.get())

    def _sender_ended(self, sender: asyncio.Task[None]) -> None:
        if not sender.cancelled() and (error := sender.exception()) is not None:
            self.fail(EngineDead(f"nothing more can be sent to the engine: {type(error).__name__}: {error}"))

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    # None: the request was given up or cut by a stop string; late outputs are expected.
                    if (inbox := self._inboxes.get(output.request)) is not None:
                        if output.finish is not None:
                            del self._inboxes[output.request]
                        inbox.put(output)
            case Stats():
                self.latest_stats = message
                self._answer(message.call, message)
            case Flushed():
                self._answer(message.call, message)
            case Drained():
                if self._drained is not None and not self._drained.done():
                    self._drained.set_result(message)
            case Ready():
                self.ready = message
            case LoadFailed():
                raise EngineDead("the engine could not start: " + "; ".join(message.lines))

    def _answer(self, call: int, answer: Stats | Flushed) -> None:
        if (waiting := self._calls.pop(call, None)) is not None and not waiting.done():
            waiting.set_result(answer)

    # ---- requests ---------------------------------------------------------------------------------------

    async def generate(self, message: RequestSpec) -> AsyncGenerator[Output, None]:
        """Outputs of one request, the last one with `finish` set.

        Closed early (or its task cancelled), the request is aborted at the engine, unless `finish` was
        called for it. Raises EngineDead, at once or in the midst; RequestError if the id is in use.
        """
        self.check_alive()
        if message.id in self._inboxes:
            raise RequestError(f"request id {message.id!r} is in use", code="duplicate_request", param="rid")
        inbox = self._inboxes[message.id] = _Inbox()
        self._outbox.put_nowait(message)
        try:
            while True:
                output = await inbox.get()
                yield output
                if output.finish is not None:
                    return
        finally:
            if self._inboxes.get(message.id) is inbox:
                del self._inboxes[message.id]
                self._outbox.put_nowait(Abort([message.id]))

    def abort(self, requests: Sequence[str] | None) -> None:
        """Ask the engine to drop these requests (None: all). Their readers get a last output, ABORT."""
        self._outbox.put_nowait(Abort(None if requests is None else list(requests)))

    def finish(self, request: str) -> None:
        """The output is complete, though the engine does not know it (a stop string was found)."""
        if self._inboxes.pop(request, None) is not None:
            self._outbox.put_nowait(Finish(request))

    # ---- calls ------------------------------------------------------------------------------------------

    def _call(self) -> tuple[int, asyncio.Future[Stats | Flushed]]:
        self.check_alive()
        self._next_call += 1
        future: asyncio.Future[Stats | Flushed] = asyncio.get_running_loop().create_future()
        self._calls[self._next_call] = future
        return self._next_call, future

    async def flush(self) -> Flushed:
        """Forget the prefix cache. `done` is False, with a reason, while requests run."""
        call, future = self._call()
        self._outbox.put_nowait(FlushCache(call))
        try:
            answer = await future
        finally:
            self._calls.pop(call, None)
        assert isinstance(answer, Flushed)
        return answer

    async def stats(self) -> Stats:
        call, future = self._call()
        self._outbox.put_nowait(GetStats(call))
        try:
            answer = await future
        finally:
            self._calls.pop(call, None)
        assert isinstance(answer, Stats)
        return answer

    async def drain(self, seconds: float) -> Drained | None:
        """Let the engine finish what runs within `seconds` and abort the rest.

        Returns None, and fails what is left, if the engine does not answer in time or is gone already.
        """
        if not self.alive:
            return None
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
            self._outbox.put_nowait(Drain(seconds))
        try:
            async with asyncio.timeout(seconds + DRAIN_MARGIN_SECONDS):
                drained = await asyncio.shield(self._drained)
        except TimeoutError:
            self.fail(EngineDead(f"the engine did not shut down within {seconds:g} seconds"))
            return None
        except EngineDead:
            return None
        self.fail(EngineDead("the engine has shut down"))
        return drained
