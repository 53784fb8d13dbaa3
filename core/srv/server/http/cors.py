"""Cross-origin requests of web pages: the preflight, and the headers that let a page read a response.

Source: the Fetch standard, "HTTP extensions", CORS protocol. Which origins are allowed is a matter of `Access`. A page
has to send a key itself: credentials that a browser would add by itself are not accepted. Must not know endpoints.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Scope

from srv.errors import RequestError
from srv.server.http.access import Access, origin_refused

MAX_AGE_SECONDS = 600  # for which a browser may keep the answer to a preflight
_HEADER_NAMES = re.compile(r"[\w\-, ]{0,1024}", re.ASCII)
_METHODS = "GET, POST, OPTIONS"


def preflight(access: Access, scope: Scope) -> Response | RequestError | None:
    """The answer to a preflight, which has no key: the headers of the request that would follow, or status 403.

    None for any other request.
    """
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if scope["method"] != "OPTIONS" or origin is None or "access-control-request-method" not in headers:
        return None
    if not access.allows_origin(origin):
        return origin_refused(origin)
    requested = headers.get("access-control-request-headers", "")
    allowed = requested if _HEADER_NAMES.fullmatch(requested) else "authorization, content-type, x-api-key"
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": allowed,
            "access-control-max-age": str(MAX_AGE_SECONDS),
        },
    )


def add_headers(access: Access, scope: Scope, start: Message) -> None:
    """Let the page that sent a request read its response; `start` is the response's first message."""
    origin = Headers(scope=scope).get("origin")
    if origin is not None and access.allows_origin(origin):
        headers = MutableHeaders(scope=start)
        headers["access-control-allow-origin"] = origin
        headers["access-control-expose-headers"] = "*"
        headers.add_vary_header("origin")
