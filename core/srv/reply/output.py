"""Collects the events of one reply: what is white space between its parts, the ids of calls, how many may be made."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Mapping
from typing import Any

from srv.reply.events import CallArguments, CallEnd, CallStart, Reasoning, ReplyEvent, Text
from srv.reply.json_text import parsed
from srv.reply.reader import SPACE
from srv.reply.tools import ToolUse

_ALPHANUMERIC = string.ascii_letters + string.digits
MAX_NAME = 256  # characters of the name of a tool, in requests and replies
MAX_CALL_ID = 512  # of the id of a call, in requests and replies; an id may contain the name
NO_SCHEMA: Mapping[str, Any] = {}


class Output:
    """White space next to a marker is dropped, unless there is text before and after: that stays in lines of its own. A
    reply without markers keeps all of its own.

    `use`: the tools of the request. `ids`: as in `ToolFormat`. `calls_before`: the number of calls in the conversation.
    `stream_reasoning`: reasoning is one event, at its end, if this is False. `separate`: reasoning is text otherwise.
    `cut`: a limit has ended the reply. `spans`: where the reasoning was in the text of the reply; `span_begin`: where
    reasoning that goes on began.
    """

    def __init__(self, use: ToolUse, ids: str, calls_before: int, *, stream_reasoning: bool, separate: bool) -> None:
        self.schemas = {tool.name: tool.parameters or NO_SCHEMA for tool in use.tools}
        self._ids, self._calls_before = ids, calls_before
        self._limit = None if use.parallel else 1
        self._stream_reasoning, self.separate = stream_reasoning, separate
        self._events: list[ReplyEvent] = []
        self._space = self._thought = self._gap = self._leading = ""
        self._trims_start = self._thinks = self._said = False
        self._fragments: list[str] = []  # of the arguments of the open call
        self.calls = 0
        self.cut = False
        self.spans: list[tuple[int, int]] = []
        self.span_begin: int | None = None

    def begin_span(self, position: int) -> None:
        """The text of the reply is reasoning from this position on, markers included."""
        self.span_begin = position

    def end_span(self, position: int) -> None:
        assert self.span_begin is not None
        self.spans.append((self.span_begin, position))
        self.span_begin = None

    def take(self) -> list[ReplyEvent]:
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        if self._trims_start:
            stripped = text.lstrip(SPACE)
            self._leading += text[: len(text) - len(stripped)]
            text = stripped
        if not text:
            return
        if self._trims_start:
            self._widen_gap(self._leading)
            self._space = self._gap if self._said else ""
        self._trims_start = False
        text = self._space + text
        stripped = text.rstrip(SPACE)
        self._space = text[len(stripped) :]
        if stripped:
            self._said, self._gap = True, ""
            self._add(Text(stripped))

    @property
    def is_between_words(self) -> bool:
        """Whether white space precedes what comes next, or a marker, or nothing."""
        return bool(self._space) or self._trims_start or not self._said

    def _leave_text(self) -> None:
        """Something else than text begins. The widest white space around it stays if text was before and follows."""
        self._widen_gap(self._space)
        self._widen_gap(self._leading)
        self._space = ""

    def _widen_gap(self, space: str) -> None:
        self._gap = max(self._gap, space, key=len)
        self._leading = ""

    def reasoning(self, text: str) -> None:
        if not self._thinks:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._leave_text()
            self._thinks = True
        text = self._space + text
        stripped = text.rstrip(SPACE)
        self._space = text[len(stripped) :]
        if not self._stream_reasoning:
            self._thought += stripped
        elif stripped:
            self._add(Reasoning(stripped))

    def end_reasoning(self) -> None:
        if self._thought:
            self._add(Reasoning(self._thought))
        self._space = self._thought = ""
        self._thinks, self._trims_start = False, True

    def start(self, name: str, call_id: str | None = None) -> None:
        self._leave_text()
        self._fragments = []
        if self._limit is None or self.calls < self._limit:
            new_id = call_id if call_id and len(call_id) <= MAX_CALL_ID else self._new_id(name)
            self._add(CallStart(self.calls, new_id, name))

    def arguments(self, fragment: str) -> None:
        self._fragments.append(fragment)
        if fragment and (self._limit is None or self.calls < self._limit):
            self._add(CallArguments(self.calls, fragment))

    def end(self) -> None:
        if self._limit is None or self.calls < self._limit:
            is_cut = self.cut and not isinstance(parsed("".join(self._fragments)), dict)
            self._add(CallEnd(self.calls, is_cut))
        self.calls += 1
        self._trims_start = True

    def finish(self) -> None:
        """The reply is over. White space at its end stays if there was nothing but text."""
        if self._thinks:
            self.end_reasoning()
        elif self._space and not self.calls:
            self._add(Text(self._space))

    def _add(self, event: ReplyEvent) -> None:
        self._events.append(event)

    def _new_id(self, name: str) -> str:
        if self._ids == "short":
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        new_id = "" if self._ids == "call" else self._ids.format(name=name, index=self._calls_before + self.calls)
        return new_id if 0 < len(new_id) <= MAX_CALL_ID else f"call_{uuid.uuid4().hex[:24]}"
