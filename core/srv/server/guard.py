"""The outermost layer of the app: the API key, and a count of every response.

Must not know endpoints, but for the two that need no key: orchestrators probe them without one.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srv.server.failures import error_body, error_response

OPEN_PATHS = frozenset({"/health", "/metrics"})


class Guard:
    """ASGI middleware. `key` None: everybody may come in. `responded` hears each response's status."""

    def __init__(self, app: ASGIApp, key: str | None, responded: Callable[[int], None]) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responded(message["status"])
            await send(message)

        if self._may_enter(scope):
            await self._app(scope, receive, counted)
            return
        body = error_body("the API key is missing or wrong; send Authorization: Bearer KEY", 401, "invalid_api_key")
        await error_response(401, body)(scope, receive, counted)

    def _may_enter(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Compared in a time that tells nothing about the key. Header values are latin-1 on the wire.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)
