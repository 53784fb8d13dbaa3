"""Limits of single API keys (`--api-keys-file`) on requests: one beyond them gets status 429 at once and is not queued.

ASGI middleware behind authentication. Requests that ask for work count: those with POST, and `GENERATING`.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from srv.errors import RequestError
from srv.server.http.access import Caller
from srv.server.http.failures import describe, error_response, report
from srv.server.http.key_uses import KeyUse, KeyUses

GENERATING = frozenset({"/health_generate"})  # with any method


class KeyRates:
    """The middleware. Keys without limits, and the key of --api-key, are not limited."""

    def __init__(self, app: ASGIApp, uses: KeyUses) -> None:
        self._app, self._uses = app, uses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        use = self._use(scope)
        if use is None:
            await self._app(scope, receive, send)
            return
        refused = use.refusal()
        if refused is not None:
            reason, seconds = refused
            error = RequestError(
                f"the API key {use.limits.name} is limited: {reason}; retry in {seconds} s",
                code="rate_limit_exceeded",
                status=429,
            )
            status, body = describe(error)
            report(scope, status, body)
            await error_response(status, body, {"retry-after": str(seconds)})(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            use.leave()

    def _use(self, scope: Scope) -> KeyUse | None:
        if scope["type"] != "http" or (scope["method"] != "POST" and scope["path"] not in GENERATING):
            return None
        caller: Caller = scope["srv.caller"]
        return self._uses.of(caller.client)
