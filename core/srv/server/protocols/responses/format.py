"""The response object of `/v1/responses` and the events of its stream.

    response.created ─► response.in_progress ─► items ─► response.completed | response.incomplete | response.failed

    message    output_item.added ─► content_part.added ─► output_text.delta* ─► output_text.done ─► content_part.done
               ─► output_item.done
    reasoning  the same with reasoning_text and without a part
    call       output_item.added ─► function_call_arguments.delta* ─► function_call_arguments.done ─► output_item.done

Every event has the next `sequence_number`. Source: OpenAI's API reference. Must not know requests or HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from srv.reply.events import CallArguments, CallEnd, CallStart, Reasoning, ReplyEvent, Text
from srv.reply.json_text import parsed
from srv.server.generation import OutputDelta
from srv.server.generation import Sequence as OutputSequence
from srv.server.http.failures import describe
from srv.server.protocols.common.logprobs import chat_logprobs
from srv.server.protocols.common.replies import Event, ReplyFormatter, validity
from srv.server.protocols.common.reply_reader import ReplyReader
from srv.server.protocols.responses.input import CUSTOM_INPUT, encode_reasoning
from srv.server.text.processor import TextProcessor
from srv.types import FinishReason, TokenLogprob

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def new_id(kind: str) -> str:
    """An id for an item of this type."""
    return f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


class ResponseFormatter(ReplyFormatter):
    """Formats one response. `frame`: its fields that the request determines. `custom`: names of tools whose input is a
    text. `encoded`: reasoning has `encrypted_content`. `logprobs`: text has log-probabilities. `on_done`: called with a
    response that is complete."""

    def __init__(
        self,
        reader: ReplyReader,
        text: TextProcessor,
        response: str,
        frame: Mapping[str, object],
        *,
        custom: frozenset[str] = frozenset(),
        encoded: bool = False,
        logprobs: bool = False,
        on_done: Callable[[Event], None] | None = None,
    ) -> None:
        super().__init__(reader)
        self._done = on_done
        self._text, self._encoded, self._with_logprobs, self._custom = text, encoded, logprobs, custom
        self._frame = {"id": response, "object": "response", "created_at": int(time.time()), **frame}
        self._status = "in_progress"
        self._error: Event | None = None
        self._incomplete: Event | None = None
        self._usage: Event | None = None
        self._validity: Event = {}
        self._items: list[dict[str, Any]] = []
        self._open = False
        self._logprobs: list[TokenLogprob] = []
        self._arguments: list[str] = []
        self._number = 0

    # ---- the frame

    def whole(self) -> Event:
        return {
            **self._frame,
            "status": self._status,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "output": [_copy(item) for item in self._items],
            "usage": self._usage,
            **self._validity,
        }

    def start(self, sequence: OutputSequence) -> list[Event]:
        return [self._event(f"response.{state}", response=self.whole()) for state in ("created", "in_progress")]

    def end(self, sequence: OutputSequence) -> list[Event]:
        cut = sequence.finish is FinishReason.LENGTH
        formatted = self._close("incomplete" if cut else "completed")
        if not self._items:  # an empty reply still has a message
            formatted += self._begin_text() + self._close("incomplete" if cut else "completed")
        self._status = "incomplete" if cut else "completed"
        self._incomplete = {"reason": "max_output_tokens"} if cut else None
        self._validity = validity(sequence)
        prompt, output = len(sequence.prompt.tokens), sequence.completion_tokens
        self._usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": sequence.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": sequence.reasoning_tokens or 0},
            "total_tokens": prompt + output,
        }
        response = self.whole()
        if self._done is not None:
            self._done(response)
        return [*formatted, self._event(f"response.{self._status}", response=response)]

    def fail(self, error: Exception) -> Event:
        _, body = describe(error)
        described: Any = body["error"]
        self._status = "failed"
        self._error = {"code": "server_error", "message": described["message"]}
        return self._event("response.failed", response=self.whole())

    def _event(self, kind: str, **fields: object) -> Event:
        event: Event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    # ---- the parts

    def add(self, events: Sequence[ReplyEvent], delta: OutputDelta) -> list[Event]:
        self._logprobs += delta.logprobs
        formatted: list[Event] = []
        for event in events:
            match event:
                case Text(text) if text:
                    opened = self._begin_text()
                    # The white space between two parts is that between two items.
                    shown = text.lstrip() if opened and len(self._items) > 1 else text
                    formatted += [*opened, self._extend_text(shown)]
                case Reasoning(text) if text:
                    formatted += self._begin_reasoning()
                    self._items[-1]["content"][0]["text"] += text
                    formatted.append(self._item_event("response.reasoning_text.delta", content_index=0, delta=text))
                case CallStart(_, call, name):
                    formatted += self._begin_call(call, name)
                case CallArguments(_, fragment):
                    formatted += self._extend_call(fragment)
                case CallEnd(_, cut):
                    formatted += self._close("incomplete" if cut else "completed")
        held_back = not events and self._is_open("message")  # white space, or what may begin a marker
        if not held_back and not any(isinstance(event, Text) for event in events):
            self._logprobs = []  # of reasoning and calls, which have none
        return formatted

    def _item_event(self, kind: str, **fields: object) -> Event:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **fields)

    def _begin(self, kind: str, **fields: object) -> list[Event]:
        formatted = self._close("completed")
        self._items.append({"type": kind, "id": new_id(kind), "status": "in_progress", **fields})
        self._open = True
        return [*formatted, self._shown("added")]

    def _shown(self, event: str) -> Event:
        """The event with the whole item."""
        item = _copy(self._items[-1])
        return self._event(f"response.output_item.{event}", output_index=len(self._items) - 1, item=item)

    def _is_open(self, kind: str) -> bool:
        return self._open and self._items[-1]["type"] == kind

    def _begin_text(self) -> list[Event]:
        if self._is_open("message"):
            return []
        formatted = self._begin("message", role="assistant", content=[])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(part)
        return [*formatted, self._item_event("response.content_part.added", content_index=0, part=dict(part))]

    def _extend_text(self, text: str) -> Event:
        part = self._items[-1]["content"][0]
        part["text"] += text
        scored: Any = chat_logprobs(self._text, self._logprobs)["content"] if self._with_logprobs else []
        self._logprobs = []
        part["logprobs"] = part["logprobs"] + scored
        return self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=scored)

    def _begin_reasoning(self) -> list[Event]:
        if self._is_open("reasoning"):
            return []
        formatted = self._begin("reasoning", summary=[], content=[])
        self._items[-1]["content"].append({"type": "reasoning_text", "text": ""})
        return formatted

    def _begin_call(self, call: str, name: str) -> list[Event]:
        self._arguments = []
        if name in self._custom:
            return self._begin("custom_tool_call", call_id=call, name=name, input="")
        return self._begin("function_call", call_id=call, name=name, arguments="")

    def _extend_call(self, fragment: str) -> list[Event]:
        self._arguments.append(fragment)
        if self._items[-1]["type"] == "custom_tool_call":
            return []  # its input is inside the arguments, and sent when these are complete
        return [self._item_event("response.function_call_arguments.delta", delta=fragment)]

    def _close(self, status: str) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        item["status"] = status
        match item["type"]:
            case "message":
                part = item["content"][0]
                event_fields = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
                formatted = [
                    self._item_event("response.output_text.done", **event_fields),
                    self._item_event("response.content_part.done", content_index=0, part=dict(part)),
                ]
            case "reasoning":
                text = item["content"][0]["text"]
                if self._encoded:
                    item["encrypted_content"] = encode_reasoning(text)
                formatted = [self._item_event("response.reasoning_text.done", content_index=0, text=text)]
            case "custom_tool_call":
                item["input"] = _custom_input("".join(self._arguments))
                formatted = [
                    self._item_event("response.custom_tool_call_input.delta", delta=item["input"]),
                    self._item_event("response.custom_tool_call_input.done", input=item["input"]),
                ]
            case _:
                item["arguments"] = "".join(self._arguments)
                event_fields = {"arguments": item["arguments"], "name": item["name"]}
                formatted = [self._item_event("response.function_call_arguments.done", **event_fields)]
        return [*formatted, self._shown("done")]


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now: events are encoded later."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [dict(part) for part in item["content"]]}


def _custom_input(arguments: str) -> str:
    """The text in the arguments of a custom tool, or what the model wrote instead."""
    fields = parsed(arguments)
    text = fields.get(CUSTOM_INPUT) if isinstance(fields, dict) else None
    return text if isinstance(text, str) else arguments
