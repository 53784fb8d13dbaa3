"""The path under which a proxy serves this server (`--root-path`), removed from requests that still have it.

A proxy may strip the prefix or not; behind this middleware, which is the outermost, no path has it, so that the rules
of keys see the same paths in both cases. Must not know endpoints.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


def without_prefix(prefix: str, path: str) -> str:
    """`path` as the endpoints know it. `prefix`: begins with a slash and does not end with one, or is empty."""
    if prefix and (path + "/").startswith(prefix + "/"):
        return path[len(prefix) :] or "/"
    return path


class RootPath:
    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := without_prefix(self._prefix, scope["path"])) != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)
