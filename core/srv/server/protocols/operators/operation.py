"""Endpoints of operators: load, pausing and going on, log levels.

Must not know how sequences are generated.
"""

from __future__ import annotations

import logging
from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from srv.errors import RequestError
from srv.server.http.json_response import json_response
from srv.server.request.fields import RequestBody
from srv.server.service import Service

STATS_SECONDS = 1.0  # how long a request waits for an engine in a long step; then it gets the last report
logger = logging.getLogger(__name__)


class PauseBody(RequestBody):
    """`/pause_generation`; the modes are SGLang's, whose default is abort."""

    mode: Literal["in_place", "retract", "abort"] | None = Field(
        None,
        description="in_place (default): running requests keep their memory and go on later; retract: they give it up"
        " meanwhile; abort: they end.",
    )


class LogLevelBody(RequestBody):
    """`/set_log_level`."""

    level: Literal["debug", "info", "warning", "error"] = Field(description="Minimum severity that is logged.")


class Operation:
    """The endpoints, one method each."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def load(self, request: Request) -> Response:
        """As SGLang reports it: one entry per replica."""
        stats = await self.service.stats(STATS_SECONDS)
        if stats is None:
            raise RequestError("the engine has not reported yet; retry later", code="engine_slow", status=503)
        per_page = self.service.settings.pool.tokens_per_page
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": stats.running + stats.waiting,
                    "num_waiting_reqs": stats.waiting,
                    "num_tokens": round(stats.pages_held * per_page),
                    "max_total_num_tokens": round(stats.pages_total * per_page),
                    "paused": stats.paused,
                }
            ]
        )

    async def server_load(self, request: Request) -> Response:
        """As vLLM reports it: requests whose responses have not ended."""
        return json_response({"server_load": self.service.lifecycle.active})

    async def pause(self, request: Request) -> Response:
        body = PauseBody.parse(await self.service.optional_body(request))
        self.service.lifecycle.check_accepting()
        aborted = self.service.lifecycle.abort(None) if body.mode == "abort" else 0
        await self.service.client.pause(True, retract=body.mode == "retract")
        logger.warning("generation is paused (%s); /continue_generation lets it go on", body.mode or "in_place")
        return json_response({"status": "ok", "paused": True, "aborted": aborted})

    async def resume(self, request: Request) -> Response:
        PauseBody.parse(await self.service.optional_body(request))
        await self.service.client.pause(False)
        logger.warning("generation goes on")
        return json_response({"status": "ok", "paused": False})

    async def set_log_level(self, request: Request) -> Response:
        level = LogLevelBody.parse(await self.service.body(request)).level.upper()
        logging.getLogger().setLevel(level)
        self.service.client.set_log_level(level)
        logger.log(logging.getLevelNamesMapping()[level], "the server logs at level %s from now on", level)
        return await self.log_level(request)

    async def log_level(self, request: Request) -> Response:
        return json_response({"level": logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()})
