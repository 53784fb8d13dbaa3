"""The built-in page at `/`: a chat, the live load and the machine; a few files without a build step.

The files need no key, because a browser cannot send one with a page; what they show comes from `/ui/state` and the API,
which do. They load nothing from elsewhere, as their content security policy says. Must not know how a chat is served.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import srv
from srv.errors import EngineDead
from srv.io.messages import Stats
from srv.server.service import Service

STATE_SECONDS = 1.0  # for an engine in a long step; then the last report is shown
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FOLDER = Path(__file__).parents[2] / "web"
_SCRIPTS = ("markdown.js", "chats.js", "app.js")  # sent as one; each uses what those before it define
_LOAD = (
    *("paused", "running", "waiting", "pages_total", "pages_free", "pages_cached", "pages_held"),
    *("prompt_tokens", "cached_tokens", "generated_tokens"),
)


class Page:
    """The endpoints, one method each."""

    def __init__(self, service: Service) -> None:
        self.service = service
        root = service.settings.root_path
        self._index = (_FOLDER / "index.html").read_text(encoding="utf-8").replace("{root}", root).encode()
        self._script = b"\n".join((_FOLDER / name).read_bytes() for name in _SCRIPTS)
        self._style = (_FOLDER / "style.css").read_bytes()

    async def index(self, request: Request) -> Response:
        return Response(self._index, headers=_HEADERS, media_type="text/html")

    async def script(self, request: Request) -> Response:
        return Response(self._script, headers=_HEADERS, media_type="text/javascript")

    async def style(self, request: Request) -> Response:
        return Response(self._style, headers=_HEADERS, media_type="text/css")

    async def state(self, request: Request) -> Response:
        settings, text = self.service.settings, self.service.text
        stats = await self._stats()
        shown = {
            "model": settings.model_name,
            "context": settings.max_request_tokens,  # of one request, prompt and output
            "version": srv.__version__,
            "chat": text.has_tokenizer and text.has_chat_template,
            "load": None if stats is None else {name: getattr(stats, name) for name in _LOAD},
            "machine": self._machine(),
        }
        return Response(msgspec.json.encode(shown), headers=_HEADERS, media_type="application/json")

    def _machine(self) -> dict[str, object]:
        """What identifies the cells of the support matrix for this server: platform, variant, model, backends."""
        settings = self.service.settings
        info, model = settings.server_info, settings.model_info
        device = info.get("device", {})
        cell = " / ".join(str(part) for part in (info.get("platform"), device.get("variant")) if part)
        kind = " ".join(str(model[name]) for name in ("architecture", "quantization") if model.get(name))
        return {
            "cell": cell or "unknown",
            "device": device.get("name") or "unknown",
            "model": kind or "unknown",
            # "slot = backend because ...": the first line says which one and why.
            "backends": {
                slot: str(why).partition(" = ")[2].partition("\n")[0] for slot, why in self._backends().items()
            },
            "slower": dict(settings.slow_paths),
        }

    def _backends(self) -> dict[str, object]:
        return dict(self.service.settings.server_info.get("backends", {}))

    async def _stats(self) -> Stats | None:
        try:
            return await self.service.stats(STATE_SECONDS)
        except EngineDead:
            return None
