"""The outermost middleware: applies the access rules, answers preflights, counts responses, handles exceptions, paces
refusals and probes.

Must not know endpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srv.errors import RequestError
from srv.server.http.access import OPEN_PATHS, Access, Caller
from srv.server.http.body import HeldBodies
from srv.server.http.cors import add_headers, preflight
from srv.server.http.failures import describe, error_response, report, unexpected_response
from srv.server.http.rate_limiter import RateLimiter

REFUSALS_PER_SECOND, REFUSAL_BURST = 50.0, 20  # while requests run; an idle server limits nothing
PROBES_PER_SECOND, PROBE_BURST = 50.0, 50  # per address
MAX_ADDRESSES = 256  # those that probed last


class ProbePacer:
    """Limits the rate of `OPEN_PATHS`, which need no key, for each address alone: one that floods them must not delay
    the probes of an orchestrator."""

    def __init__(self) -> None:
        self._limiters: OrderedDict[str, RateLimiter] = OrderedDict()

    async def acquire(self, address: str) -> None:
        limiter = self._limiters.pop(address, None) or RateLimiter(PROBES_PER_SECOND, PROBE_BURST)
        self._limiters[address] = limiter
        if len(self._limiters) > MAX_ADDRESSES:
            self._limiters.popitem(last=False)
        await limiter.acquire()


def owner_of(request: Request | None) -> str:
    """Who sent a request (`Caller.owner`), for what belongs to one client and for fair shares; "" without a server."""
    return "" if request is None else caller_of(request).owner


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["srv.caller"]
    return caller


class AuthMiddleware:
    """ASGI middleware. `responded` is called with each response's status.

    `busy` returns whether requests are running, which a flood of refusals would delay. `bodies` counts what requests
    hold until their response starts.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        bodies: HeldBodies,
        responded: Callable[[int], None],
        busy: Callable[[], bool],
    ) -> None:
        self._app, self._access, self._bodies = app, access, bodies
        self._busy = busy
        self._rate_limiter = RateLimiter(REFUSALS_PER_SECOND, REFUSAL_BURST)
        self._probes = ProbePacer()
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False
        share = scope["srv.body"] = self._bodies.share()

        async def send_counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                share.release()
                self._responded(message["status"])
                add_headers(self._access, scope, message)
                if self._busy():
                    await self._pace(scope, message["status"])
            await send(message)

        answer = preflight(self._access, scope) or self._access.admit(scope)
        if isinstance(answer, Response):
            await answer(scope, receive, send_counted)
            return
        if isinstance(answer, RequestError):
            status, body = describe(answer)
            report(scope, status, body)
            await error_response(status, body, scope=scope)(scope, receive, send_counted)
            return
        scope["srv.caller"] = answer
        if not answer.stranger and (accepted := scope.get("srv.accepted")) is not None:
            accepted()  # the connection keeps its place
        try:
            await self._app(scope, receive, send_counted)
        except Exception as error:
            # Handled here, so that Starlette and uvicorn do not log it again. A response that has started cannot be
            # replaced: the HTTP server logs the exception and closes the connection.
            if started:
                raise
            await unexpected_response(scope, error)(scope, receive, send_counted)
        finally:
            share.release()

    async def _pace(self, scope: Scope, status: int) -> None:
        if 400 <= status < 500:
            await self._rate_limiter.acquire()
        elif scope["path"] in OPEN_PATHS:
            await self._probes.acquire(scope["client"][0] if scope.get("client") else "")
