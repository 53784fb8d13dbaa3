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
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response

from srv.errors import RequestError
from srv.server.generation import CompletedSequence, OutputDelta, RequestGroup, Sequence
from srv.server.http.auth import owner_of
from srv.server.http.events import DONE, EventStream, event, while_connected
from srv.server.http.failures import error_body
from srv.server.http.json_response import json_response
from srv.server.lifecycle import SHUTDOWN_MESSAGE
from srv.server.prompt_request import TokenizedPrompt
from srv.server.protocols.building import build
from srv.server.protocols.openai_fields import StreamOptions
from srv.server.sampling_fields import SamplingBody
from srv.server.service import Service
from srv.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class ResponseEnvelope:
    """The fields that all objects of one response share."""

    id: str
    object_type: str
    model: str
    fingerprint: str
    tier: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[dict[str, object]], **extra: object) -> dict[str, object]:
        return {
            "id": self.id,
            "object": self.object_type,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **({} if self.tier is None else {"service_tier": self.tier}),
            "choices": choices,
            **extra,
        }


class ResponseFormatter(Protocol):
    """Formats the output of one request; each request gets its own."""

    def opening(self, group: RequestGroup) -> list[dict[str, object]]:
        """The choices to stream before the first token."""
        ...

    def shared(self, sequence: Sequence, scores: list[TokenLogprob] | None) -> dict[str, object]:
        """What the response says about the prompt besides its choices. `scores`: of the prompt, if requested.

        A stream contains it with the first delta of its first sequence.
        """
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


class StreamedUsage(NamedTuple):
    """Where a stream contains token counts."""

    at_the_end: bool
    in_every_chunk: bool


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
        usage = streamed_usage(fields.stream, parsed.stream_options)
        rid = fields.rid or f"{self.name}-{uuid.uuid4().hex}"
        ticket, group = self.service.start(parsed.prompts, [rid], arrival, owner=owner_of(request))
        if fields.stream:
            envelope = self._envelope(rid, self.chunk_object_type, fields)
            return EventStream(self._events(envelope, parsed.formatter, group, usage), ticket.close)
        try:
            results = await while_connected(request.receive, group.gather())
            self.service.lifecycle.check_not_aborted(result.finish for result in results)
        finally:
            ticket.close()
        envelope = self._envelope(rid, self.object_type, fields)

        def show() -> Response:
            choices = [with_validity(parsed.formatter.choice(result), result.sequence) for result in results]
            shared = parsed.formatter.shared(results[0].sequence, results[0].prompt_logprobs)
            return json_response(envelope.wrap(choices, usage=group.usage().openai(), **shared))

        return await build(results, show)

    def _envelope(self, rid: str, object_type: str, fields: SamplingBody) -> ResponseEnvelope:
        settings = self.service.settings
        tier = None if fields.service_tier is None else "default"
        return ResponseEnvelope(rid, object_type, settings.model_name, settings.system_fingerprint, tier)

    async def _events(
        self, envelope: ResponseEnvelope, formatter: ResponseFormatter, group: RequestGroup, usage: StreamedUsage
    ) -> AsyncGenerator[bytes, None]:
        def counts() -> dict[str, object]:
            if usage.in_every_chunk:
                return {"usage": group.usage().openai()}
            # With include_usage every chunk but the last has "usage": null (OpenAI's reference).
            return {"usage": None} if usage.at_the_end else {}

        before = b"".join(event(envelope.wrap([choice], **counts())) for choice in formatter.opening(group))
        aborted, prompt_sent = False, False

        def show(delta: OutputDelta) -> bytes:
            nonlocal prompt_sent
            shown, choices, extra = b"", formatter.chunk(delta), counts()
            for choice in choices:
                shared: dict[str, object] = {}
                if delta.sequence.index == 0 and not prompt_sent:
                    prompt_sent, shared = True, formatter.shared(delta.sequence, delta.prompt_logprobs)
                shown += event(envelope.wrap([with_validity(choice, delta.sequence)], **extra, **shared))
            return shown

        async with aclosing(group.deltas()) as deltas:
            async for delta in deltas:
                aborted |= delta.finish is FinishReason.ABORT
                # A long prompt's log-probabilities are in its first event.
                before += await build([delta], partial(show, delta))
                if before:
                    yield before
                before = b""
        if aborted and self.service.lifecycle.draining:
            yield event(error_body(SHUTDOWN_MESSAGE, 503, "shutting_down"))
            return
        if usage.at_the_end:
            yield event(envelope.wrap([], usage=group.usage().openai()))
        yield DONE


def finish_name(finish: FinishReason | None) -> str | None:
    return None if finish is None else finish.value


def with_validity(choice: dict[str, object], sequence: Sequence) -> dict[str, object]:
    """The choice that ends a sequence says so if the output does not follow its grammar."""
    if sequence.structured_output_valid is False and choice.get("finish_reason") is not None:
        return {**choice, "structured_output_valid": False}
    return choice


def streamed_usage(stream: bool | None, options: StreamOptions | None) -> StreamedUsage:
    """Where usage is streamed. Raises RequestError for stream_options that ask for something without stream."""
    if options is None:
        return StreamedUsage(False, False)
    if not stream and (options.include_usage or options.continuous_usage_stats):
        raise RequestError(
            "stream_options is refused: it needs stream = true; set that or remove it",
            code="invalid_value",
            param="stream_options",
        )
    return StreamedUsage(bool(options.include_usage), bool(options.continuous_usage_stats))
