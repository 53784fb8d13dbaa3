"""`/start_`, `/stop_` and `/dump_expert_distribution_record`: how many tokens choose each expert (SGLang's names).

Must not know what counts them (`srv.worker.expert_counts`).
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from srv.commands import Answer, Command, ExpertCounts, ReadExpertCounts, StartExpertCounts, StopExpertCounts
from srv.errors import RequestError
from srv.server.http.json_response import json_response
from srv.server.service import Service

PER_PASS = "per_pass"


class ExpertUsageRecord:
    """The endpoints, one method each."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def start(self, request: Request) -> Response:
        await self._run(StartExpertCounts(), "started")
        return json_response({"recording": True})

    async def stop(self, request: Request) -> Response:
        await self._run(StopExpertCounts(), "stopped")
        return json_response({"recording": False})

    async def dump(self, request: Request) -> Response:
        """What has been counted since the start or the last dump, which is forgotten."""
        answer, *_ = await self._run(ReadExpertCounts(), "read")  # ranks choose alike
        usage = answer.experts
        if usage is None:
            raise _failed("read", "the engine sent no counts")
        summary: dict[str, Any] = {"mode": usage.mode, "recording": usage.recording, "layers": usage.layers}
        records = [_record(record) for record in usage.records]
        if usage.mode == PER_PASS:
            return json_response(summary | {"passes": records})
        return json_response(summary | (records[0] if records else {"steps": 0, "tokens": 0, "logical_count": []}))

    async def _run(self, command: Command, what: str) -> list[Answer]:
        self._service.lifecycle.check_accepting()
        answers = await self._service.client.control(command)
        for answer in answers:
            if answer.error is not None:
                raise _failed(what, answer.error)
        return answers


def _record(counts: ExpertCounts) -> dict[str, Any]:
    return {
        "last_step": counts.step,
        "steps": counts.steps,
        "tokens": counts.tokens,
        "logical_count": counts.counts,  # by layer, then by expert
    }


def _failed(what: str, reason: str) -> RequestError:
    return RequestError(f"the record of the usage of experts was not {what}: {reason}", code="expert_record_refused")
