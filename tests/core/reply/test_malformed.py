"""Whatever a model writes, the parser does not raise, loses nothing, and does not depend on where the text is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts import USE, Transcript, events_of, merged, parser_of

from srv.reply.events import CallArguments, CallEnd, CallStart, Reasoning, ReplyEvent, Text
from srv.reply.formats import choose
from srv.reply.json_text import parsed
from srv.reply.parser import ParserOptions
from srv.reply.reasoning_rows import CHANNEL_ROWS, REASONING_ROWS
from srv.reply.rows import TaggedBody
from srv.reply.tool_rows import TOOL_ROWS

TOOL_NAMES = [row.name for row in (*TOOL_ROWS, *CHANNEL_ROWS)]
REASONING = ["none", *(row.name for row in REASONING_ROWS)]
PIECES = (
    *('{"name": "weather", "arguments": ', '{"name": ', '"arguments": ', '"parameters": ', '{"', '": ', '"', "\\", "{"),
    *(
        "}",
        "[",
        "]",
        ",",
        ":",
        ";",
        "weather",
        "now",
        "functions.now:0",
        "weather(",
        "city=",
        ")",
        "call:weather{",
        "1.5",
    ),
    *(
        "null",
        "true",
        "```json\n",
        "```",
        "\n",
        " ",
        "<",
        "</",
        ">",
        "#",
        "'",
        "to=functions.now",
        "assistant",
        "final",
    ),
    *('{"name": "now", "arguments": {}}', "{}", "é", "\\ud83d", "<tool_call>", "weather\n"),
)
FORMATS = {name: choose(name, "none", []) for name in TOOL_NAMES}


def _markers(name: str) -> list[str]:
    row = FORMATS[name]
    if row.channels is not None:
        return list(row.channels.markers)
    assert row.tools is not None
    tags = [body for body in row.tools.bodies if isinstance(body, TaggedBody)]
    inner = [f"{body.name[0]}weather{body.name[1][0]}" for body in tags]
    return [
        *(mark for marks in (row.tools.section, row.tools.call) if marks for group in marks for mark in group),
        *row.tools.markers,
        *inner,
        *(f"{body.key[0]}city{body.key[1]}{body.value}" for body in tags),
    ]


@st.composite
def replies(draw: st.DrawFn) -> Transcript:
    """Markers and pieces of the format in any order, with words between them, each of which occurs once."""
    name = draw(st.sampled_from(TOOL_NAMES))
    thinks = draw(st.sampled_from(REASONING))
    pieces = st.one_of(st.sampled_from(PIECES), st.sampled_from(_markers(name)), st.just("WORD"))
    parts = draw(st.lists(pieces, max_size=25))
    words = (f"w{index}w" if part == "WORD" else part for index, part in enumerate(parts))
    return Transcript(name, "".join(words), thinks=thinks, prompt=draw(st.sampled_from(["", "<think>"])))


def said(events: Iterable[ReplyEvent]) -> str:
    texts = []
    for event in events:
        match event:
            case Text(text) | Reasoning(text) | CallArguments(_, text):
                texts.append(text)
            case CallStart(_, call_id, name):
                texts += [call_id, name]
    return "".join(texts)


@settings(max_examples=700, deadline=None)
@given(replies(), st.booleans())
def test_no_word_is_lost(transcript: Transcript, cut: bool) -> None:
    events = events_of(parser_of(transcript), [transcript.reply], cut)
    msgspec.json.encode(events)  # every event can be sent
    text = said(events)
    for word in re.findall("w[0-9]+w", transcript.reply):
        assert word in text, events
    opened: list[int] = []
    for event in events:
        match event:
            case CallStart(index):
                assert not opened, "calls interleave"
                opened.append(index)
            case CallArguments(index):
                assert opened == [index]
            case CallEnd(index):
                assert opened.pop() == index
            case _:
                assert not opened, "text interleaves with a call"
    assert not opened, "a call does not end"


@settings(max_examples=300, deadline=None)
@given(replies(), st.data())
def test_cuts_change_nothing(transcript: Transcript, data: st.DataObject) -> None:
    reply = transcript.reply
    whole = merged(events_of(parser_of(transcript), [reply]))
    assert merged(events_of(parser_of(transcript), reply)) == whole
    at = data.draw(st.integers(0, len(reply)))
    assert merged(events_of(parser_of(transcript), [reply[:at], reply[at:]])) == whole


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TOOL_NAMES), st.text(max_size=80))
def test_text_without_markers_stays_as_it_is(name: str, text: str) -> None:
    if any(mark in text for mark in _markers(name)) or FORMATS[name].channels is not None:
        return
    parser = FORMATS[name].parser(ParserOptions(USE), "")
    assert parser is not None
    assert "".join(event.text for event in events_of(parser, text) if isinstance(event, Text)) == text


@every(
    ("name", "reply"),
    [
        ("qwen", '<tool_call>{"name": "now", "arguments": {"a": "' + "x" * 100_000),
        ("qwen", '<tool_call>{"arguments": ' + "[" * 100_000),
        ("qwen", "<tool_call>" * 10_000),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>" + "</paramete" * 10_000),
        ("pythonic", "[weather(city=" + "(" * 50_000),
        ("gemma4", "<|tool_call>call:weather{" + "a" * 100_000),
        ("gpt-oss", "<|channel|>analysis" * 10_000),
    ],
    ids=lambda value: str(value)[:60],
)
def test_long_replies_end(name: str, reply: str) -> None:
    """In pieces of 100 characters; scanning again what is held back would not end within the time of a test."""
    parser = FORMATS[name].parser(ParserOptions(USE), "")
    assert parser is not None
    assert events_of(parser, [reply[at : at + 100] for at in range(0, len(reply), 100)])


@every(
    ("name", "reply"),
    [
        ("pythonic", '[weather(city="\\ud83d", near=["\\ude00", 1])]'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=near>['\\ud83d']</parameter></function></tool_call>"),
        ("qwen", '<tool_call>{"id": "\\ud83d", "name": "now\\ud83d", "arguments": "{\\"a\\": 1}"}</tool_call>'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>\\ud83d<|"|>}<tool_call|>'),
    ],
)
def test_half_of_a_surrogate_pair_can_be_sent(name: str, reply: str) -> None:
    parser = FORMATS[name].parser(ParserOptions(USE), "")
    assert parser is not None
    events = events_of(parser, [reply])
    assert any(isinstance(event, CallStart) for event in events)
    msgspec.json.encode(events)
    arguments = "".join(event.fragment for event in events if isinstance(event, CallArguments))
    assert msgspec.json.encode(parsed(arguments))
