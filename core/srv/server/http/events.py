"""Long responses: server-sent events, and work that is cancelled when the client disconnects.

Owns the wire format of events and the detection of disconnects. Must not know the content of events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from srv.errors import EngineDead, RequestError
from srv.server.http.failures import describe, error_response, report
from srv.server.observe.records import CALLER

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


def event(data: object) -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def named_event(data: Mapping[str, object]) -> bytes:
    """One server-sent event whose name is the `type` of its payload."""
    return f"event: {data['type']}\n".encode() + event(data)


def openai_failure(error: Exception) -> bytes:
    """The last event of a stream that failed, as chat completions and `/generate` end it."""
    return event(describe(error)[1])


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, `work` is cancelled and ClientDisconnect raised.

    The body of the request must have been read, so that `receive` can only return the disconnect.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they are produced; an error between them becomes the last event.

    The response starts with the first event, so that a request that is refused before that gets its real status.

    If the client disconnects, `events` is closed early. `on_close` is called exactly once, afterwards. `failure`: the
    event for an error, in the format of the protocol.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_close: Callable[[], None],
        failure: Callable[[Exception], bytes] = openai_failure,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._on_close, self._failure = on_close, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(scope, receive, send))
        except ClientDisconnect:
            return  # the sequences were aborted when `events` was closed
        finally:
            self._on_close()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                first = await anext(self._events, b"")
            except (RequestError, EngineDead) as error:
                _mark_failed()
                status, body = describe(error)
                report(scope, status, body)
                await error_response(status, body, scope=scope)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in _with_errors(self._events, self._failure):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_errors(
    events: AsyncGenerator[bytes, None], failure: Callable[[Exception], bytes]
) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in events:
            yield chunk
    except (RequestError, EngineDead) as error:
        _mark_failed()
        yield failure(error)
    except Exception as error:
        _mark_failed()
        log.exception("a stream failed")
        yield failure(error)


def _mark_failed() -> None:
    """The status of a stream that has begun is 200, however it ends."""
    if (caller := CALLER.get()) is not None:
        caller.failed = True
