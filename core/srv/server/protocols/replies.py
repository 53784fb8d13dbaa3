"""The common part of the protocols whose response is one reply in parts: Anthropic's Messages, OpenAI's Responses.

    body ─► ask ─► Asked ─► RequestGroup ─► OutputDelta ─► ReplyEvents ─► ReplyFormat: events, or the whole object

A reply that is not streamed goes through the same format, so that both forms have the same parts and ids. Must not know
the fields or events of a protocol.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srv.reply.events import ReplyEvent
from srv.reply.parser import ParserOptions
from srv.reply.tools import count_calls
from srv.server.generation import OutputDelta, RequestGroup
from srv.server.generation import Sequence as OutputSequence
from srv.server.http.auth import owner_of
from srv.server.http.events import EventStream, named_event, while_connected
from srv.server.prompt_request import PromptRequest, TokenizedPrompt
from srv.server.protocols.conversations import Conversation, render
from srv.server.protocols.reply_reader import ReplyReader, constrained
from srv.server.sampling_fields import Sampling
from srv.server.service import Service
from srv.types import FinishReason

Event = dict[str, object]


def validity(sequence: OutputSequence) -> Event:
    """The extension field of a response whose output does not follow its grammar."""
    return {"structured_output_valid": False} if sequence.structured_output_valid is False else {}


class ReplyFormat(Protocol):
    """Formats the reply to one request. Each method returns the events to stream, in order."""

    def start(self, sequence: OutputSequence) -> list[Event]:
        """Before the first part; the tokens of the prompt and those in the cache are known."""
        ...

    def add(self, events: Sequence[ReplyEvent], delta: OutputDelta) -> list[Event]: ...

    def end(self, sequence: OutputSequence) -> list[Event]: ...

    def fail(self, error: Exception) -> list[Event]:
        """The end of a stream that failed."""
        ...

    def whole(self) -> Event:
        """The response with everything added so far."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A valid request. `done` is called with the whole response of a reply that is complete."""

    rid: str
    stream: bool
    prompt: TokenizedPrompt
    format: ReplyFormat
    reader: ReplyReader
    done: Callable[[Event], None] = lambda response: None


class ReplyEndpoint(ABC):
    """One endpoint; subclasses read its bodies."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    async def ask(self, request: Request, body: object) -> Asked:
        """Validate the body and tokenize its prompt. Raises RequestError."""

    def headers(self, request: Request) -> dict[str, str]:
        """Those of a response that is no error."""
        return {}

    async def __call__(self, request: Request) -> Response:
        arrival = time.perf_counter()
        self.service.lifecycle.check_accepting()
        asked = await self.ask(request, await self.service.body(request))
        ticket, group = self.service.start([asked.prompt], [asked.rid], arrival, owner=owner_of(request))
        if asked.stream:
            return EventStream(
                self._chunks(asked, group),
                ticket.close,
                failure=lambda error: b"".join(map(named_event, asked.format.fail(error))),
                headers=self.headers(request),
            )
        try:
            await while_connected(request.receive, self._collect(asked, group))
        finally:
            ticket.close()
        response = msgspec.json.encode(asked.format.whole())
        return Response(response, headers=self.headers(request), media_type="application/json")

    async def prepare(
        self,
        conversation: Conversation,
        sampling: Sampling,
        field_of: Callable[[str], str],
        namespace: str,
        clip: bool = False,
    ) -> tuple[TokenizedPrompt, ReplyReader]:
        """The prompt of a conversation, and what reads the reply to it. `field_of`, `clip`: as in `PromptRequest`.

        Raises RequestError.
        """
        preprocessor, replies = self.service.preprocessor, self.service.settings.reply_format
        last = conversation.messages[-1].role if conversation.messages else ""
        options = ParserOptions(conversation.tools, continued=conversation.continued and last == "assistant")
        replies.check(conversation.tools)
        text = await render(preprocessor, conversation)
        calls = count_calls(conversation.messages)
        sampling = constrained(sampling, replies, options, text, calls)
        (prompt,) = await preprocessor.prepare_all(
            [PromptRequest(text, sampling, conversation.param, field_of, namespace, replies.markers(options), clip)],
            default_max_tokens=None,
            special=False,  # the rendered template contains the special tokens
        )
        return prompt, ReplyReader(replies.parser(options, text, calls))

    async def _chunks(self, asked: Asked, group: RequestGroup) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events(asked, group)) as groups:
            async for events in groups:
                yield b"".join(map(named_event, events))

    async def _collect(self, asked: Asked, group: RequestGroup) -> None:
        async with aclosing(self._events(asked, group)) as groups:
            async for _ in groups:
                pass

    async def _events(self, asked: Asked, group: RequestGroup) -> AsyncGenerator[list[Event], None]:
        """What each delta adds, never nothing. Raises EngineDead, or RequestError, also if the reply was aborted."""
        (sequence,) = group.sequences
        started = False
        async with aclosing(group.deltas()) as deltas:
            async for delta in deltas:
                if delta.finish is FinishReason.ABORT:
                    break
                events = [] if started else asked.format.start(sequence)
                started = True
                events += asked.format.add(asked.reader.read(delta), delta)
                if delta.finish is not None:
                    events += asked.format.end(sequence)
                    asked.done(asked.format.whole())
                if events:
                    yield events
        self.service.lifecycle.check_complete([sequence.finish] if sequence.finish is not None else [])
