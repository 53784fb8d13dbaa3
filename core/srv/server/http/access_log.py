"""One line per HTTP response: who, what, status, size and time; never a query, a header or a body.

It is on with `--access-log`, and with `--log-level-http` info or debug.
Must not know endpoints. Connections that are refused before a request is complete are not requests.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_PATH = 200
log = logging.getLogger("srv.access")


class AccessLog:
    """ASGI middleware, outside of authentication, so that refusals are logged, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        log.setLevel(logging.INFO)  # whatever --log-level is: the operator asked for these lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, size = time.perf_counter(), 0, 0

        async def send_counted(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            client = scope.get("client")
            shown = scope["path"][:MAX_PATH].encode("unicode_escape").decode()  # no line breaks of a client
            seconds = time.perf_counter() - started
            who = client[0] if client else "-"
            level = logging.WARNING if isinstance(status, int) and status >= 500 else logging.INFO
            log.log(level, '%s "%s %s" %s %d B %.3f s', who, scope["method"], shown, status or "-", size, seconds)
