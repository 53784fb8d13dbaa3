"""The header `x-request-id` of every response: the one that the client sent, or a new id.

OpenAI's clients show it in their errors, and proxies follow a request by it. Must not know endpoints.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srv.server.http.error_shapes import request_id

HEADER = "x-request-id"
_FITS = re.compile(r"[!-~]{1,256}")


def id_of(scope: Scope) -> str:
    """The value of the header in the response to this request."""
    sent = Headers(scope=scope).get(HEADER, "")
    return sent if _FITS.fullmatch(sent) else request_id(scope)


class RequestIds:
    """ASGI middleware, the outermost, so that refusals have one, too. Those of `srv.server.http.connection` never get
    here: it sets the header itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = id_of(scope)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        await self._app(scope, receive, send_named)
