"""What the two OpenAI endpoints share: the way of a request from body to response, streamed or whole.

    body ─► begin ─► works ─► Group ─► Shape: chunks of a stream, or the choices of one answer

Must not know which fields a body has beyond the shared ones.
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
from srv.server.events import DONE, EventStream, event, while_connected
from srv.server.failures import error_body
from srv.server.generation import Gathered, Group, Step
from srv.server.intake import Work
from srv.server.lifecycle import CUT
from srv.server.openai_fields import StreamOptions
from srv.server.sampling_fields import SamplingBody
from srv.server.service import Service
from srv.types import FinishReason


@dataclass(frozen=True, slots=True)
class Head:
    """The members that every object of one response carries."""

    id: str
    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def say(self, choices: list[dict[str, object]], **more: object) -> dict[str, object]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class Shape(Protocol):
    """How one request of an endpoint is shown; made anew for each request."""

    def opening(self, group: Group) -> list[dict[str, object]]:
        """Choices to stream before the first token."""
        ...

    def chunk(self, step: Step) -> list[dict[str, object]]:
        """Choices to stream for one step."""
        ...

    def choice(self, result: Gathered) -> dict[str, object]:
        """The choice of one complete sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that was found good: its shared fields, the work, and how to show the results."""

    fields: SamplingBody
    stream_options: StreamOptions | None
    works: list[Work]
    shape: Shape


class OpenAIEndpoint(ABC):
    """One endpoint; subclasses bring its schema and its shapes. `name` begins its response ids."""

    name: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    async def begin(self, body: object) -> Begun:
        """Check the body, tokenize, and say how to show the results. Raises RequestError."""

    async def __call__(self, request: Request) -> Response:
        arrival = time.perf_counter()
        self.service.lifecycle.check_accepting()
        begun = await self.begin(await self.service.body(request))
        fields = begun.fields
        with_usage = usage_wanted(fields.stream, begun.stream_options)
        rid = fields.rid or f"{self.name}-{uuid.uuid4().hex}"
        ticket, group = self.service.start(begun.works, [rid], arrival)
        if fields.stream:
            head = Head(rid, self.chunk_kind, self.service.settings.model_name)
            return EventStream(self._events(head, begun.shape, group, with_usage), ticket.close)
        try:
            results = await while_connected(request.receive, group.gather())
            self.service.lifecycle.check_not_cut(result.finish for result in results)
        finally:
            ticket.close()
        head = Head(rid, self.kind, self.service.settings.model_name)
        answer = head.say([begun.shape.choice(result) for result in results], usage=group.usage().openai())
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _events(self, head: Head, shape: Shape, group: Group, with_usage: bool) -> AsyncGenerator[bytes, None]:
        # With include_usage every chunk but the last says "usage": null (OpenAI's reference).
        more: dict[str, object] = {"usage": None} if with_usage else {}
        opening = b"".join(event(head.say([choice], **more)) for choice in shape.opening(group))
        aborted = False
        async with aclosing(group.steps()) as steps:
            async for step in steps:
                aborted |= step.finish is FinishReason.ABORT
                yield opening + b"".join(event(head.say([choice], **more)) for choice in shape.chunk(step))
                opening = b""
        if aborted and self.service.lifecycle.draining:
            yield event(error_body(CUT, 503, "shutting_down"))
            return
        if with_usage:
            yield event(head.say([], usage=group.usage().openai()))
        yield DONE


def finish_name(finish: FinishReason | None) -> str | None:
    return None if finish is None else finish.value


def usage_wanted(stream: bool | None, options: StreamOptions | None) -> bool:
    """Raises RequestError if there are options for a stream and no stream."""
    if options is None:
        return False
    if not stream:
        raise RequestError(
            "stream_options is refused: it goes with stream = true only; remove it or stream",
            code="invalid_value",
            param="stream_options",
        )
    return bool(options.include_usage)
