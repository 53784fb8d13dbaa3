"""The common part of both OpenAI endpoints: from a request body to a response, streamed or complete.

    body ─► parse ─► tokenized prompts ─► RequestGroup ─► ResponseFormatter: stream chunks, or choices

Must not know which fields a body has, except the shared ones.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srv.errors import RequestError
from srv.server.generation import CompletedSequence, OutputDelta, RequestGroup
from srv.server.http.events import DONE, EventStream, event, while_connected
from srv.server.http.failures import error_body
from srv.server.lifecycle import SHUTDOWN_MESSAGE
from srv.server.preprocessor import TokenizedPrompt
from srv.server.protocols.openai_fields import StreamOptions
from srv.server.sampling_fields import SamplingBody
from srv.server.service import Service
from srv.types import FinishReason


@dataclass(frozen=True, slots=True)
class ResponseEnvelope:
    """The fields that all objects of one response share."""

    id: str
    object_type: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[dict[str, object]], **extra: object) -> dict[str, object]:
        return {
            "id": self.id,
            "object": self.object_type,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **extra,
        }


class ResponseFormatter(Protocol):
    """Formats the output of one request; each request gets its own."""

    def opening(self, group: RequestGroup) -> list[dict[str, object]]:
        """The choices to stream before the first token."""
        ...

    def chunk(self, delta: OutputDelta) -> list[dict[str, object]]:
        """The choices to stream for one delta."""
        ...

    def choice(self, result: CompletedSequence) -> dict[str, object]:
        """The choice of one complete sequence."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A valid request: its shared fields, its tokenized prompts and the formatter of its response."""

    fields: SamplingBody
    stream_options: StreamOptions | None
    prompts: list[TokenizedPrompt]
    formatter: ResponseFormatter


class OpenAIEndpoint(ABC):
    """One endpoint; subclasses define its schema and formatter. `name` is the prefix of response ids."""

    name: ClassVar[str]
    object_type: ClassVar[str]
    chunk_object_type: ClassVar[str]

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    async def parse(self, body: object) -> ParsedRequest:
        """Validate the body and tokenize its prompts. Raises RequestError."""

    async def __call__(self, request: Request) -> Response:
        arrival = time.perf_counter()
        self.service.lifecycle.check_accepting()
        parsed = await self.parse(await self.service.body(request))
        fields = parsed.fields
        with_usage = wants_usage(fields.stream, parsed.stream_options)
        rid = fields.rid or f"{self.name}-{uuid.uuid4().hex}"
        ticket, group = self.service.start(parsed.prompts, [rid], arrival)
        if fields.stream:
            envelope = ResponseEnvelope(rid, self.chunk_object_type, self.service.settings.model_name)
            return EventStream(self._events(envelope, parsed.formatter, group, with_usage), ticket.close)
        try:
            results = await while_connected(request.receive, group.gather())
            self.service.lifecycle.check_not_aborted(result.finish for result in results)
        finally:
            ticket.close()
        envelope = ResponseEnvelope(rid, self.object_type, self.service.settings.model_name)
        response = envelope.wrap([parsed.formatter.choice(result) for result in results], usage=group.usage().openai())
        return Response(msgspec.json.encode(response), media_type="application/json")

    async def _events(
        self, envelope: ResponseEnvelope, formatter: ResponseFormatter, group: RequestGroup, with_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        # With include_usage every chunk but the last has "usage": null (OpenAI's reference).
        extra: dict[str, object] = {"usage": None} if with_usage else {}
        opening = b"".join(event(envelope.wrap([choice], **extra)) for choice in formatter.opening(group))
        aborted = False
        async with aclosing(group.deltas()) as deltas:
            async for delta in deltas:
                aborted |= delta.finish is FinishReason.ABORT
                yield opening + b"".join(event(envelope.wrap([choice], **extra)) for choice in formatter.chunk(delta))
                opening = b""
        if aborted and self.service.lifecycle.draining:
            yield event(error_body(SHUTDOWN_MESSAGE, 503, "shutting_down"))
            return
        if with_usage:
            yield event(envelope.wrap([], usage=group.usage().openai()))
        yield DONE


def finish_name(finish: FinishReason | None) -> str | None:
    return None if finish is None else finish.value


def wants_usage(stream: bool | None, options: StreamOptions | None) -> bool:
    """Whether usage is streamed. Raises RequestError for stream_options without stream."""
    if options is None:
        return False
    if not stream:
        raise RequestError(
            "stream_options is refused: it needs stream = true; set that or remove it",
            code="invalid_value",
            param="stream_options",
        )
    return bool(options.include_usage)
