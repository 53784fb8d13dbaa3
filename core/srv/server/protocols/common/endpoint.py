"""The path of every request that generates text, in whichever protocol.

    body ─► ask ─► Asked ─► RequestGroup ─► OutputDelta ─► Formatter: events of a stream, or the whole response

Must not know the fields, events or objects of a protocol.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srv.server.generation import CompletedSequence, OutputDelta, RequestGroup
from srv.server.http.auth import caller_of
from srv.server.http.events import EventStream, openai_failure, while_connected
from srv.server.protocols.common.building import build
from srv.server.request.grammar_rules import not_enforced
from srv.server.request.prompt_request import TokenizedPrompt
from srv.server.service import Service
from srv.types import FinishReason


class Formatter(ABC):
    """Formats the response to one request; each request gets its own.

    A stream is `opening`, then `stream` for each delta, then `closing`, or `failure` at any point. A whole response is
    `collect` for each delta, then `whole`.
    """

    group: RequestGroup
    results: list[CompletedSequence]

    def begin(self, group: RequestGroup) -> None:
        """Called once, before anything else."""
        self.group = group
        self.results = [CompletedSequence(sequence) for sequence in group.sequences]

    def opening(self) -> bytes:
        """What precedes the first delta, which has arrived."""
        return b""

    @abstractmethod
    def stream(self, delta: OutputDelta) -> bytes: ...

    def shown(self, delta: OutputDelta) -> OutputDelta | CompletedSequence:
        """The output that `stream` formats: its size says how long that takes."""
        return delta

    @abstractmethod
    def closing(self) -> bytes: ...

    def failure(self, error: Exception) -> bytes:
        """The end of a stream that failed."""
        return openai_failure(error)

    def collect(self, delta: OutputDelta) -> None:
        self.results[delta.sequence.index].add(delta)

    @abstractmethod
    def whole(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A valid request. `rids`: its id, or one per prompt; `batch`: then an id for all of them."""

    prompts: list[TokenizedPrompt]
    rids: list[str]
    stream: bool
    formatter: Formatter
    batch: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class GeneratingEndpoint(ABC):
    """One endpoint; subclasses read its bodies. `finishes_aborted`: its responses have a finish reason for an output
    that was aborted; else that is an error."""

    finishes_aborted: ClassVar[bool] = False

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    async def ask(self, body: object, request: Request) -> Asked:
        """Validate the body and tokenize its prompts. Raises RequestError."""

    async def __call__(self, request: Request) -> Response:
        arrival = time.perf_counter()
        self.service.lifecycle.check_accepting()
        prepared = await self.ask(await self.service.body(request), request)
        formatter = prepared.formatter
        headers = {**prepared.headers, **not_enforced(prompt.grammar for prompt in prepared.prompts)}
        ticket, group = self.service.start(prepared.prompts, prepared.rids, arrival, prepared.batch, caller_of(request))
        formatter.begin(group)
        if prepared.stream:
            return EventStream(self._stream(formatter), ticket.close, formatter.failure, headers)
        try:
            await while_connected(request.receive, self._collect(formatter))
            self.check_whole([result.finish for result in formatter.results])
        finally:
            ticket.close()

        def whole() -> Response:
            encoded = msgspec.json.encode(formatter.whole())
            return Response(encoded, headers=headers, media_type="application/json")

        return await build(formatter.results, whole)

    def check(self, finishes: Sequence[FinishReason]) -> None:
        """Raises RequestError if outputs that ended so are an error."""
        lifecycle = self.service.lifecycle
        (lifecycle.check_not_aborted if self.finishes_aborted else lifecycle.check_complete)(finishes)

    def check_whole(self, finishes: Sequence[FinishReason]) -> None:
        """As `check`, for a response that is not streamed."""
        self.check(finishes)

    async def _collect(self, formatter: Formatter) -> None:
        async with aclosing(formatter.group.deltas()) as deltas:
            async for delta in deltas:
                formatter.collect(delta)

    async def _stream(self, formatter: Formatter) -> AsyncGenerator[bytes, None]:
        """What each delta adds, never nothing. Raises EngineDead, or RequestError, also if an output was aborted."""
        finishes: list[FinishReason] = []
        opened = False
        async with aclosing(formatter.group.deltas()) as deltas:
            async for delta in deltas:
                finishes += [] if delta.finish is None else [delta.finish]
                if delta.finish is FinishReason.ABORT and not self.finishes_aborted:
                    break
                events = b"" if opened else formatter.opening()
                opened = True
                events += await build([formatter.shown(delta)], partial(formatter.stream, delta))
                if events:
                    yield events
        self.check(finishes)
        if closing := formatter.closing():
            yield closing
