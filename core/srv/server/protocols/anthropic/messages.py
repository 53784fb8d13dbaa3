"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

Owns the message object and the events of its stream. Must not know how a prompt is rendered or a reply is generated.

    message_start ─► (content_block_start ─► content_block_delta* ─► content_block_stop)*
                  ─► message_delta ─► message_stop

A `ping` follows the start of the first block, as in Anthropic's own streams. Blocks never overlap.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srv.errors import RequestError
from srv.reply.events import CallArguments, CallEnd, CallStart, Reasoning, ReplyEvent, Text
from srv.reply.json_text import parsed
from srv.server.generation import OutputDelta
from srv.server.generation import Sequence as OutputSequence
from srv.server.http.auth import owner_of
from srv.server.http.error_shapes import anthropic_error, request_id
from srv.server.http.failures import describe
from srv.server.protocols.anthropic.fields import CountTokensBody, MessagesBody
from srv.server.protocols.anthropic.input import read_conversation
from srv.server.protocols.common.conversations import count_tokens
from srv.server.protocols.common.endpoint import Asked, GeneratingEndpoint
from srv.server.protocols.common.replies import Event, ReplyFormatter, validity
from srv.server.protocols.common.reply_reader import ReplyReader, prepare
from srv.server.protocols.common.thinking import AskedBudget
from srv.server.request.sampling_fields import Sampling
from srv.server.service import Service
from srv.types import FinishReason


class MessageFormatter(ReplyFormatter):
    """Formats one message. `clipped`: its context has room for less than `max_tokens`."""

    def __init__(self, reader: ReplyReader, model: str, clipped: bool, request: str) -> None:
        super().__init__(reader)
        self._id, self._model, self._clipped, self._request = f"msg_{uuid.uuid4().hex}", model, clipped, request
        self._content: list[dict[str, Any]] = []
        self._arguments: list[str] = []
        self._open = self._pinged = False
        self._no_calls: dict[
            int, dict[str, Any] | None
        ] = {}  # what `whole` shows of blocks without an object; None: nothing
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._usage: dict[str, int] = {}
        self._validity: dict[str, object] = {}

    # ---- the parts

    def start(self, sequence: OutputSequence) -> list[Event]:
        self._count(sequence)
        return [{"type": "message_start", "message": {**self.whole(), "usage": {**self._usage, "output_tokens": 0}}}]

    def add(self, events: Sequence[ReplyEvent], delta: OutputDelta) -> list[Event]:
        formatted: list[Event] = []
        for event in events:
            match event:
                case Text(text) if text:
                    opened = self._in_block("text", {"text": ""})
                    # The white space between two parts is that between two blocks.
                    shown = text.lstrip() if opened and len(self._content) > 1 else text
                    formatted += opened + self._extend("text", shown, "text_delta")
                case Reasoning(text) if text:
                    formatted += self._in_block("thinking", {"thinking": "", "signature": ""})
                    formatted += self._extend("thinking", text, "thinking_delta")
                case CallStart(_, name_of, name):
                    self._arguments = []
                    formatted += self._close() + self._begin(
                        {"type": "tool_use", "id": name_of, "name": name, "input": {}}
                    )
                case CallArguments(_, fragment):
                    self._arguments.append(fragment)
                    formatted.append(self._delta({"type": "input_json_delta", "partial_json": fragment}))
                case CallEnd(_, cut):
                    self._end_call("".join(self._arguments), cut)
                    formatted += self._close()
        return formatted

    def end(self, sequence: OutputSequence) -> list[Event]:
        self._count(sequence)
        formatted = self._close()
        if not self._content:  # an empty reply still has a block of text
            formatted += self._begin({"type": "text", "text": ""}) + self._close()
        self._stop_reason, self._stop_sequence = self._why(sequence)
        self._validity = validity(sequence)
        reason = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        last: Event = {"type": "message_delta", "delta": reason, "usage": self._usage, **self._validity}
        return [*formatted, last, {"type": "message_stop"}]

    def fail(self, error: Exception) -> Event:
        return anthropic_error(*describe(error), self._request)

    def whole(self) -> Event:
        blocks = (self._no_calls.get(index, block) for index, block in enumerate(self._content))
        content = [dict(block) for block in blocks if block is not None]
        if self._stop_reason is not None and not content:
            content = [{"type": "text", "text": ""}]
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage,
            **self._validity,
        }

    # ---- blocks

    def _end_call(self, arguments: str, cut: bool) -> None:
        """A stream shows the arguments as the model wrote them. If they are no object, the whole message has them as
        text, or leaves out a call that was cut: an input of {} would be run.
        """
        call_input = parsed(arguments)
        if isinstance(call_input, dict):
            self._content[-1]["input"] = call_input
        elif arguments or cut:
            self._no_calls[len(self._content) - 1] = None if cut else {"type": "text", "text": arguments}

    def _in_block(self, kind: str, empty: dict[str, str]) -> list[Event]:
        """The events after which a block of this type is open."""
        if self._open and self._content[-1]["type"] == kind:
            return []
        return self._close() + self._begin({"type": kind, **empty})

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        self._content.append(dict(block))
        self._open = True
        start: list[Event] = [
            {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block},
        ]
        if not self._pinged:
            self._pinged = True
            start.append({"type": "ping"})
        return start

    def _extend(self, name: str, text: str, kind: str) -> list[Event]:
        self._content[-1][name] += text
        return [self._delta({"type": kind, name: text})]

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        closing: list[Event] = []
        block = self._content[-1]
        if block["type"] == "thinking":
            block["signature"] = uuid.uuid4().hex  # clients send it back and expect one; nothing verifies it
            closing.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        return [*closing, {"type": "content_block_stop", "index": len(self._content) - 1}]

    # ---- the end

    def _count(self, sequence: OutputSequence) -> None:
        cached = sequence.cached_tokens
        self._usage = {
            "input_tokens": len(sequence.prompt.tokens) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": sequence.completion_tokens,
        }

    def _why(self, sequence: OutputSequence) -> tuple[str, str | None]:
        """The stop reason and, if one was found, the stop sequence."""
        if sequence.finish is FinishReason.LENGTH:
            return ("model_context_window_exceeded" if self._clipped else "max_tokens"), None
        if isinstance(sequence.matched, str):
            return "stop_sequence", sequence.matched
        calls = (
            block["type"] == "tool_use" for index, block in enumerate(self._content) if index not in self._no_calls
        )
        return ("tool_use" if any(calls) else "end_turn"), None


class Messages(GeneratingEndpoint):
    """`/v1/messages`."""

    async def ask(self, body: object, request: Request) -> Asked:
        fields = MessagesBody.parse(body)
        self.service.preprocessor.check_model(fields.model)
        prompt, reader = await prepare(
            self.service,
            read_conversation(fields),
            _sampling(fields),
            field_of=fields.spelled.__getitem__,
            namespace=fields.namespace,
            owner=owner_of(request),
            clip=True,
            thinking=_budget(fields),
        )
        clipped = prompt.params.max_tokens < fields.max_tokens
        name = request_id(request.scope)
        formatter = MessageFormatter(reader(), self.service.settings.model_name, clipped, name)
        return Asked([prompt], [fields.own_id or name], bool(fields.stream), formatter, headers={"request-id": name})


def _budget(fields: MessagesBody) -> AskedBudget | None:
    """Clients send one to every model; one without reasoning has nothing to limit."""
    tokens = fields.thinking.budget_tokens if fields.thinking else None
    return None if tokens is None else AskedBudget(tokens, "thinking.budget_tokens", needs_format=False)


def _sampling(fields: MessagesBody) -> Sampling:
    formats = (fields.output_format, fields.output_config.format if fields.output_config else None)
    if len({output_format.text for output_format in formats if output_format is not None}) > 1:
        raise RequestError(
            "output_format is refused with another output_config.format; send one of them",
            code="invalid_value",
            param="output_format",
        )
    grammar = next((output_format for output_format in formats if output_format is not None), None)
    return msgspec.structs.replace(fields.sampling(), grammar=grammar)


class CountTokens:
    """`/v1/messages/count_tokens`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, request: Request) -> Response:
        body = CountTokensBody.parse(await self._service.body(request))
        preprocessor = self._service.preprocessor
        preprocessor.check_model(body.model)
        count = await count_tokens(preprocessor, read_conversation(body))
        counted = msgspec.json.encode({"input_tokens": count})
        return Response(counted, headers={"request-id": request_id(request.scope)}, media_type="application/json")
