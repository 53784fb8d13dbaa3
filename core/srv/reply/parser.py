"""The streaming state machine between the detokenizer and the protocols: text in, events out.

    detokenizer ─ text ─► ReplyParser ─ events ─► protocol

    ┌► reasoning ─ its end marker, or a marker of a call ─┐
    └──────────── begin marker ◄── answer ◄───────────────┘
                                    │  ▲
             marker of section, call│  │ end marker, or anything else
                                    ▼  │
                                    calls

One machine serves all rows of the tables of formats. Its events are the same however the text is cut. Text that looks
like a call and is none comes out as text, with its markers. Must not know tokens, HTTP or any protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from srv.reply.bodies import BodyPlace, header_body, json_body
from srv.reply.channels import read_channels
from srv.reply.events import ReplyEvent, Text
from srv.reply.literals import bare_body, python_body
from srv.reply.output import Output
from srv.reply.reader import MarkerSet, Reader, Wait
from srv.reply.rows import (
    BareBody,
    Body,
    ChannelFormat,
    HeaderBody,
    JsonBody,
    Marks,
    PythonBody,
    ReasoningFormat,
    TaggedBody,
    ToolFormat,
)
from srv.reply.tagged import tagged_body
from srv.reply.tools import NO_TOOLS, ToolUse

_NO_MARKS = Marks((), ())
_NO_TOOLS = ToolFormat("none")


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """What a request asks of its reply. `separate_reasoning`: reasoning is separated from the text (else it is part of
    it, with its markers). `stream_reasoning`: in pieces, or in one piece when it is complete. `continued`: the prompt
    ends with the beginning of the answer."""

    use: ToolUse = NO_TOOLS
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    continued: bool = False


class ReplyParser:
    """Parses one reply. `feed` its text in order, then `finish`.

    tools, reasoning: rows of the tables; a `ChannelFormat` stands for both. prompt: the text whose end says whether the
    reply starts with reasoning. calls_before: the number of calls in the conversation (`count_calls`).
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        channels: ChannelFormat | None,
        options: ParserOptions,
        *,
        prompt: str = "",
        calls_before: int = 0,
    ) -> None:
        active = options.use.active
        self._forced = active and options.use.forced
        self._tools = tools if active and channels is None else None
        self._reasoning = reasoning if channels is None else None
        self._output = Output(
            options.use,
            "call" if tools is None else tools.ids,
            calls_before,
            stream_reasoning=options.stream_reasoning,
            separate=options.separate_reasoning,
        )
        self._reader = Reader()
        self._length = 0
        self._thinks = self._reasoning is not None and self._reasoning.starts_inside(prompt, options.continued)
        self._machine = self._run() if channels is None else read_channels(channels, self._reader, self._output, active)

    def feed(self, text: str) -> list[ReplyEvent]:
        """The events that more text leads to."""
        self._length += len(text)
        self._reader.push(text)
        next(self._machine, None)
        return self._output.take()

    def finish(self, cut: bool = False) -> list[ReplyEvent]:
        """The last events. `cut`: a limit ended the reply, so that what is open in it stays open.

        The rest of a forced call that was cut before its arguments is no text: the grammar, not the model, wrote it.
        """
        self._reader.close(cut)
        self._output.cut = cut
        next(self._machine, None)
        self._output.finish()
        events = self._output.take()
        return [event for event in events if not isinstance(event, Text)] if cut and self._forced else events

    def thought(self) -> list[tuple[int, int]]:
        """Which characters of the text so far are reasoning: positions of begin and end, markers included."""
        begin = self._output.span_begin
        return self._output.spans if begin is None else [*self._output.spans, (begin, self._length)]

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._output.calls

    def _run(self) -> Wait[None]:
        row, reader = self._reasoning, self._reader
        if row is not None:  # a model may write the begin marker although the prompt ends with it
            begin = yield from reader.accept_behind_space(row.marks.begin)
            if begin or self._thinks:
                yield from self._think(begin)
        if self._tools is not None and self._tools.unmarked:
            yield from self._calls(_NO_MARKS, _NO_MARKS, declared=True)
        while not reader.ended:
            yield from self._answer()

    # ---- states

    def _think(self, begin: str) -> Wait[None]:
        """Reasoning, up to its end. `begin`: the marker that began it, which is text if it is not separated."""
        row, reader, output = self._reasoning, self._reader, self._output
        assert row is not None
        output.begin_span(reader.position - len(begin))
        put = output.reasoning if output.separate else output.text
        put("" if output.separate else begin)
        ends = MarkerSet((*row.marks.end, *(row.ends_before if self._tools is not None else ())))
        while True:
            match = ends.find(reader.text, reader.at, reader.closed)
            put(reader.text[reader.at : match.position])
            reader.at = match.position
            if match.marker or not (yield from self._drop_and_wait()):
                break
        if match.marker in row.marks.end:
            reader.at += len(match.marker)
            put("" if output.separate else match.marker)
        output.end_span(reader.position)
        if output.separate:
            output.end_reasoning()
        reader.drop()

    def _answer(self) -> Wait[None]:
        """Text up to the next marker, and what the marker opens."""
        reader, output, row = self._reader, self._output, self._reasoning
        begins = row.marks.begin if row is not None and row.anywhere else ()
        tools = self._tools or _NO_TOOLS
        section, call = tools.section or _NO_MARKS, tools.call or _NO_MARKS
        openings = (*section.begin, *call.begin, *tools.bare)
        around = row.around if row is not None and output.separate else ()
        leftover = (*(() if not output.calls else (*section.end, *call.end)), *around)
        markers = MarkerSet((*openings, *begins, *leftover))
        while True:
            match = markers.find(reader.text, reader.at, reader.closed)
            output.text(reader.text[reader.at : match.position])
            reader.at = match.position
            if match.marker:
                break
            if not (yield from self._drop_and_wait()):
                return
        reader.drop()
        if match.marker in begins:
            reader.at = len(match.marker)
            yield from self._think(match.marker)
            return
        if match.marker not in openings:
            reader.at = len(match.marker)
            return
        is_bare = match.marker in tools.bare
        # Then nothing but the place and the name says that it is a call.
        declared = (is_bare and tools.unmarked) or match.marker in tools.ambiguous
        is_call = not declared or output.is_between_words
        if not (is_call and (yield from self._calls(section, _NO_MARKS if is_bare else call, declared=declared))):
            output.text(match.marker)
            reader.at = len(match.marker)

    def _calls(self, section: Marks, call: Marks, *, declared: bool) -> Wait[bool]:
        """The calls here, in their section. False, at the same position, if there is none."""
        reader, output = self._reader, self._output
        start, before = reader.at, output.calls
        place = BodyPlace(reader, output, MarkerSet((*section.begin, *section.end, *call.begin, *call.end)), declared)
        in_section = bool((yield from reader.accept(section.begin)))
        while True:
            begin = reader.at
            if call.begin and not (yield from reader.accept_behind_space(call.begin)):
                break
            if not (yield from self._body(place)):
                reader.at = begin
                break
            yield from reader.accept_behind_space(call.end)
            reader.drop()
            if not in_section and not call.begin:
                break
        if output.calls == before:
            reader.at = start
            return False
        yield from reader.accept_behind_space(section.end)
        reader.drop()
        return True

    def _body(self, place: BodyPlace) -> Wait[bool]:
        assert self._tools is not None
        begin = self._reader.at
        for body in self._tools.bodies:
            if (yield from _read_body(body, place)):
                return True
            self._reader.at = begin
        return False

    def _drop_and_wait(self) -> Wait[bool]:
        self._reader.drop()
        return (yield from self._reader.more())


def _read_body(body: Body, place: BodyPlace) -> Wait[bool]:
    match body:
        case JsonBody():
            return json_body(body, place)
        case HeaderBody():
            return header_body(body, place)
        case TaggedBody():
            return tagged_body(body, place)
        case PythonBody():
            return python_body(body, place)
        case BareBody():
            return bare_body(body, place)
