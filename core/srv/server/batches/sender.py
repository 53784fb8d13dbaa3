"""Serves a line of a batch like a request that a client sends to the line's endpoint.

Must not know batches or the fields of a body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from srv.errors import RequestError
from srv.server.http.access import Caller
from srv.server.http.body import HeldBodies
from srv.server.http.failures import describe
from srv.server.request.grammar_rules import NOT_ENFORCED

Handler = Callable[[Request], Awaitable[Response]]
# All lines have one share, so that the scheduler lets every owner have its own at once (docs/adr/0038).
QUEUE = "lines of batches"  # no digest: no key has it
logger = logging.getLogger(__name__)


class LineAnswer(NamedTuple):
    """`body`: JSON. `code`: of an error. `headers`: of the response, which say something about its body."""

    status: int
    body: bytes
    code: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})


class LineSender:
    """Calls handlers in this process. `bodies`: what requests hold together, lines included."""

    def __init__(self, handlers: Mapping[str, Handler], bodies: HeldBodies) -> None:
        self._handlers, self._bodies = handlers, bodies

    async def send(self, endpoint: str, body: bytes, caller: Caller) -> LineAnswer:
        """The answer, an error included. Cancellation aborts the request. `caller`: whoever made the batch."""
        share = self._bodies.share()
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "srv.caller": Caller(caller.owner, cache=caller.cache, queue=QUEUE),
            "srv.body": share,
        }
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not messages:
                await asyncio.get_running_loop().create_future()  # the client never leaves
            return messages.pop()

        try:
            response = await self._handlers[endpoint](Request(scope, receive))
            headers = {name: value for name, value in response.headers.items() if name == NOT_ENFORCED}
            return LineAnswer(response.status_code, bytes(response.body), headers=headers)
        except Exception as error:
            status, described = describe(error)
            if status == 500:
                logger.error("a line of a batch failed", exc_info=error)
            code = error.code if isinstance(error, RequestError) else None
            return LineAnswer(status, msgspec.json.encode(described), code)
        finally:
            share.release()
