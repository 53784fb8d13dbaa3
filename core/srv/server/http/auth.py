"""The outermost middleware: checks the API key, counts responses, handles exceptions and limits the rate of refusals.

Must not know endpoints, except the two that need no key, because orchestrators probe them without one.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srv.server.http.failures import error_body, error_response, report, unexpected_response
from srv.server.http.rate_limiter import RateLimiter

REFUSALS_PER_SECOND, REFUSAL_BURST = 50.0, 20  # while requests run; an idle server does not limit refusals
OPEN_PATHS = frozenset({"/health", "/metrics"})


class AuthMiddleware:
    """ASGI middleware. With `key` None every request is accepted. `responded` is called with each response's status.

    `busy` returns whether requests are running, which a flood of refusals would delay.
    """

    def __init__(
        self, app: ASGIApp, key: str | None, responded: Callable[[int], None], busy: Callable[[], bool]
    ) -> None:
        self._app = app
        self._busy = busy
        self._rate_limiter = RateLimiter(REFUSALS_PER_SECOND, REFUSAL_BURST)
        self._key = None if key is None else key.encode()
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False

        async def send_counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._responded(message["status"])
                if 400 <= message["status"] < 500 and self._busy():
                    await self._rate_limiter.acquire()
            await send(message)

        if self._is_authorized(scope):
            try:
                await self._app(scope, receive, send_counted)
            except Exception as error:
                # Handled here, so that Starlette and uvicorn do not log it again. A response that has started cannot be
                # replaced: the HTTP server logs the exception and closes the connection.
                if started:
                    raise
                await unexpected_response(scope["method"], scope["path"], error)(scope, receive, send_counted)
            return
        body = error_body("the API key is missing or wrong; send Authorization: Bearer KEY", 401, "invalid_api_key")
        report(scope, 401, body)
        await error_response(401, body)(scope, receive, send_counted)

    def _is_authorized(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Compared in constant time. Header values are latin-1 on the wire.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)
