"""Long responses: server-sent events, and work that is cancelled when the client disconnects.

Owns the wire format of events and the detection of disconnects. Must not know the content of events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from srv.errors import EngineDead, RequestError
from srv.server.http.failures import describe, error_response, report

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


def event(data: object) -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


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

    If the client disconnects, `events` is closed early. `on_close` is called exactly once, afterwards.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

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
                status, body = describe(error)
                report(scope, status, body)
                await error_response(status, body)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in _with_errors(self._events):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_errors(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in events:
            yield chunk
    except (RequestError, EngineDead) as error:
        yield event(describe(error)[1])
    except Exception as error:
        log.exception("a stream failed")
        yield event(describe(error)[1])
