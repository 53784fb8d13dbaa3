"""The API process's client of the engine: it routes each output to the inbox of its request.

Owns the requests that wait for outputs, and what happens to them when their caller leaves or the engine dies. Must not
know HTTP, text, protocols or how messages are transported (`Channel`).

    generate() --RequestSpec/Abort/Finish--> outbox --run()--> Channel.send
    generate() <-------- inbox <--------------- run() <---- Channel.receive
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeVar

from srv.commands import Answer, Command
from srv.errors import EngineDead, RequestError
from srv.io.messages import (
    Abort,
    Control,
    Controlled,
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
    Pause,
    Paused,
    Ready,
    SetLogLevel,
    Stats,
    ToEngine,
)
from srv.types import FinishReason, RequestSpec, Vocabulary

log = logging.getLogger(__name__)
Reply = TypeVar("Reply", Stats, Flushed, Paused, Controlled)
DRAIN_MARGIN_SECONDS = 5.0  # extra time after the grace period for the engine to send Drained
# The status of a request by the error code of its last output; all other codes are internal errors.
_STATUS = {
    "empty_prompt": 400,
    "invalid_token_id": 400,
    "context_length_exceeded": 400,
    "exceeds_pool": 400,
    "grammar_failed": 400,
    "duplicate_request": 409,
    "queue_full": 503,
    "shutting_down": 503,
}


class Channel(Protocol):
    """Carries messages to and from one engine, in order. `receive` raises EngineDead when the engine is gone."""

    async def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine: ...


class _Inbox:
    """A queue of the outputs of one request, for one reader, which wakes up once for any number of puts."""

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
        """The next output. A failure is raised only after all outputs that arrived before it."""
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
    """The client of one engine. All methods must be called on the event loop that runs `run()`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outbox: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._inboxes: dict[str, _Inbox] = {}
        self._calls: dict[int, asyncio.Future[Stats | Flushed | Paused | Controlled]] = {}
        self._next_call = 0
        self._drained: asyncio.Future[Drained] | None = None
        self._failure: EngineDead | None = None
        self.received = 0  # messages so far
        self.latest_stats: Stats | None = None
        self.ready: Ready | None = None

    # ---- lifecycle -------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._failure is None

    @property
    def waiting(self) -> int:
        """The number of requests whose last output has not arrived."""
        return len(self._inboxes)

    def check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDead(str(self._failure))

    def fail(self, failure: EngineDead) -> None:
        """Fail all waiting requests and calls with `failure`, as the engine is gone. Later calls have no effect."""
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
        """Send and receive messages until the engine is gone. Run it as one task."""
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
            self.fail(EngineDead(f"the connection to the engine failed: {type(error).__name__}: {error}"))
            raise
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send_all(self) -> None:
        while True:
            await self._channel.send(await self._outbox.get())

    def _sender_ended(self, sender: asyncio.Task[None]) -> None:
        if not sender.cancelled() and (error := sender.exception()) is not None:
            self.fail(EngineDead(f"messages cannot be sent to the engine: {type(error).__name__}: {error}"))

    def _dispatch(self, message: FromEngine) -> None:
        self.received += 1
        match message:
            case Outputs(outputs):
                for output in outputs:
                    # None: the request was aborted or ended by a stop string; late outputs are expected.
                    if (inbox := self._inboxes.get(output.request)) is not None:
                        if output.finish is not None:
                            del self._inboxes[output.request]
                        inbox.put(output)
            case Stats():
                self.latest_stats = message
                self._complete_call(message.call, message)
            case Flushed() | Paused() | Controlled():
                self._complete_call(message.call, message)
            case Drained():
                if self._drained is not None and not self._drained.done():
                    self._drained.set_result(message)
            case Ready():
                self.ready = message
            case LoadFailed():
                raise EngineDead("the engine could not start: " + "; ".join(message.lines))

    def _complete_call(self, call: int, reply: Stats | Flushed | Paused | Controlled) -> None:
        if (waiting := self._calls.pop(call, None)) is not None and not waiting.done():
            waiting.set_result(reply)

    # ---- requests ---------------------------------------------------------------------------------------

    async def generate(self, spec: RequestSpec) -> AsyncGenerator[Output, None]:
        """Yield the outputs of one request, the last one with `finish` set.

        If the iterator is closed early or its task cancelled, the request is aborted at the engine, unless `finish` was
        called for it. Raises EngineDead, before or between outputs; RequestError if the id is in use, or if the engine
        ends the request with an error.
        """
        self.check_alive()
        if spec.id in self._inboxes:
            raise RequestError(f"request id {spec.id!r} is in use", code="duplicate_request", param="rid")
        inbox = self._inboxes[spec.id] = _Inbox()
        self._outbox.put_nowait(spec)
        try:
            while True:
                output = await inbox.get()
                if output.finish is FinishReason.ERROR:
                    raise _request_error(output.error)
                yield output
                if output.finish is not None:
                    return
        finally:
            if self._inboxes.get(spec.id) is inbox:
                del self._inboxes[spec.id]
                self._outbox.put_nowait(Abort([spec.id]))

    def abort(self, requests: Sequence[str] | None) -> None:
        """Abort these requests at the engine (None: all). Their readers get a last output with ABORT."""
        self._outbox.put_nowait(Abort(None if requests is None else list(requests)))

    def finish(self, request: str) -> None:
        """End a request whose output is complete without the engine knowing it (a stop string was found)."""
        if self._inboxes.pop(request, None) is not None:
            self._outbox.put_nowait(Finish(request))

    # ---- calls ------------------------------------------------------------------------------------------

    async def _call(self, make: Callable[[int], ToEngine], kind: type[Reply]) -> Reply:
        """Send a message with the number of this call, and wait for the reply to it. Raises EngineDead."""
        self.check_alive()
        self._next_call += 1
        call = self._next_call
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(make(call))
        try:
            reply = await future
        finally:
            self._calls.pop(call, None)
        assert isinstance(reply, kind)
        return reply

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Tell the engine the tokens' bytes, before the first request with a grammar."""
        self._outbox.put_nowait(vocabulary)

    async def flush(self) -> Flushed:
        """Flush the prefix cache. `done` is False, with a reason, while requests are running."""
        return await self._call(FlushCache, Flushed)

    async def stats(self) -> Stats:
        return await self._call(GetStats, Stats)

    async def pause(self, paused: bool, retract: bool = False) -> bool:
        """Let the engine plan no further steps, or go on; returns whether it is paused now. No request is lost."""
        return (await self._call(lambda call: Pause(call, paused, retract), Paused)).paused

    def set_log_level(self, level: str) -> None:
        """The minimum severity that the engine process logs from now on."""
        self._outbox.put_nowait(SetLogLevel(level))

    async def control(self, command: Command) -> list[Answer]:
        """Let every rank of the engine carry out a command between two steps."""
        return (await self._call(lambda call: Control(call, command), Controlled)).answers

    async def drain(self, seconds: float) -> Drained | None:
        """Let the engine finish running requests within `seconds` and abort the rest.

        Returns None, and fails all remaining requests, if the engine does not reply in time or is gone already.
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


def _request_error(error: tuple[str, str] | None) -> RequestError:
    """The exception for the (code, message) of the last output of a request."""
    code, message = error or ("engine_error", "the engine failed on this request")
    return RequestError(message, code=code, status=_STATUS.get(code, 500))
