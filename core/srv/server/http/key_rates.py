"""Limits of single API keys (`--api-keys-file`): requests per minute, and requests at the same time.

ASGI middleware behind authentication. Requests that ask for work (POST) count; one beyond a limit gets status 429 at
once and is not queued. Must not know endpoints.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from srv.errors import RequestError
from srv.server.access import sent_keys
from srv.server.client_keys import ClientKey
from srv.server.http.failures import describe, error_response, report

BURST_SECONDS = 10.0  # an idle key may send what it may send in this time at once
MIN_BURST = 1.0


class _Use:
    """What one key has used. The bucket is refilled evenly."""

    def __init__(self, limits: ClientKey) -> None:
        self.limits = limits
        self.running = 0
        self._rate = (limits.requests_per_minute or 0) / 60
        self._capacity = max(MIN_BURST, self._rate * BURST_SECONDS)
        self._left, self._at = self._capacity, time.monotonic()

    def refusal(self) -> tuple[str, int] | None:
        """Why one more request is refused now, with the seconds to wait; None if it is counted."""
        most = self.limits.concurrent_requests
        if most is not None and self.running >= most:
            return f"it has {self.running} running requests, which is its limit", 1
        if self._rate:
            now = time.monotonic()
            self._left = min(self._capacity, self._left + (now - self._at) * self._rate)
            self._at = now
            if self._left < 1:
                wait = math.ceil((1 - self._left) / self._rate)
                return f"it may send {self.limits.requests_per_minute} requests per minute", wait
            self._left -= 1
        self.running += 1
        return None


class KeyRates:
    """The middleware. Keys without limits, and the key of --api-key, are not limited."""

    def __init__(self, app: ASGIApp, keys: Sequence[ClientKey]) -> None:
        self._app = app
        self._uses = {_digest(each.key): _Use(each) for each in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        use = self._use(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
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
            use.running -= 1

    def _use(self, scope: Scope) -> _Use | None:
        for key in sent_keys(Headers(scope=scope)):
            if (found := self._uses.get(_digest(key))) is not None:
                return found
        return None


def _digest(key: str) -> bytes:
    """Looking up a digest takes the same time for every wrong key."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()
