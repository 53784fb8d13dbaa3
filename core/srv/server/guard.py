"""The outermost layer of the app: the API key, a count of every response, an answer to every exception, and
the pace of refusals.

Must not know endpoints, but for the two that need no key: orchestrators probe them without one.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srv.server.failures import error_body, error_response, unexpected_response
from srv.server.pace import Pace

REFUSALS_PER_SECOND, REFUSALS_AT_ONCE = 50.0, 20  # while requests run; an idle server answers as fast as it can
OPEN_PATHS = frozenset({"/health", "/metrics"})


class Guard:
    """ASGI middleware. `key` None: everybody may come in. `responded` hears each response's status.

    `busy` says whether requests run, whose tokens a flood of refusals would delay.
    """

    def __init__(
        self, app: ASGIApp, key: str | None, responded: Callable[[int], None], busy: Callable[[], bool]
    ) -> None:
        self._app = app
        self._busy = busy
        self._pace = Pace(REFUSALS_PER_SECOND, REFUSALS_AT_ONCE)
        self._key = None if key is None else key.encode()
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._responded(message["status"])
                if 400 <= message["status"] < 500 and self._busy():
                    await self._pace.turn()
            await send(message)

        if self._may_enter(scope):
            try:
                await self._app(scope, receive, counted)
            except Exception as error:
                # Answered here, so that the frameworks outside, which would log it again, never see it. An answer
                # that has begun cannot be taken back: the HTTP server logs the exception and cuts the connection.
                if begun:
                    raise
                await unexpected_response(scope["method"], scope["path"], error)(scope, receive, counted)
            return
        body = error_body("the API key is missing or wrong; send Authorization: Bearer KEY", 401, "invalid_api_key")
        await error_response(401, body)(scope, receive, counted)

    def _may_enter(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Compared in a time that tells nothing about the key. Header values are latin-1 on the wire.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)
