"""What replies say, in all formats, and that it does not depend on how their text arrives."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from every import every
from transcripts import OPTIONS, TRANSCRIPTS, USE, Transcript, events_of, merged, parser_of

from srv.reply.events import CallArguments, CallStart, ParsedReply, Reasoning
from srv.reply.formats import choose
from srv.reply.parser import ParserOptions
from srv.reply.reasoning_rows import CHANNEL_ROWS, REASONING_ROWS
from srv.reply.tool_rows import TOOL_ROWS


@every("transcript", TRANSCRIPTS)
def test_what_a_reply_says(transcript: Transcript) -> None:
    reply = ParsedReply()
    reply.add(events_of(parser_of(transcript), [transcript.reply]))
    assert (reply.text, reply.reasoning) == (transcript.text, transcript.reasoning)
    assert tuple((call.name, json.loads(call.arguments)) for call in reply.calls) == transcript.calls
    ids = [call.id for call in reply.calls]
    assert len(set(ids)) == len(ids)


@every("transcript", TRANSCRIPTS)
def test_cuts_change_nothing(transcript: Transcript) -> None:
    """Cut at each character, at all of them, and into pieces such as tokens are."""
    reply, draw = transcript.reply, random.Random(transcript.reply)
    whole = merged(events_of(parser_of(transcript), [reply]))
    for at in range(1, len(reply)):
        assert merged(events_of(parser_of(transcript), [reply[:at], reply[at:]])) == whole, reply[:at]
    assert merged(events_of(parser_of(transcript), reply)) == whole
    for _ in range(20):
        borders = sorted(draw.sample(range(len(reply)), min(len(reply), draw.randint(2, 30))))
        parts = [reply[begin:end] for begin, end in zip([0, *borders], [*borders, len(reply)], strict=True)]
        assert merged(events_of(parser_of(transcript), parts)) == whole, parts


def tokens_of(transcript: Transcript) -> list[str]:
    """As a tokenizer could split the reply: the markers of its formats, parts of words, white space, and the rest."""
    markers = choose(transcript.tools, transcript.thinks, []).markers(OPTIONS)
    longest_first = sorted(map(re.escape, markers), key=len, reverse=True)
    return re.findall("|".join([*longest_first, r" ?\w{1,4}", r"\s+", "."]), transcript.reply, re.DOTALL)


@pytest.mark.proof(minutes=0.5)
@every("transcript", TRANSCRIPTS)
def test_a_reply_that_ends_anywhere_is_the_same_in_whatever_pieces_it_arrives(transcript: Transcript) -> None:
    """Ended behind each token, by itself or by a limit, in pieces of one, two, three, and any number of tokens."""
    tokens, draw = tokens_of(transcript), random.Random(transcript.reply)
    assert "".join(tokens) == transcript.reply
    for end, cut in itertools.product(range(1, len(tokens) + 1), (False, True)):
        whole = merged(events_of(parser_of(transcript), ["".join(tokens[:end])], cut))
        for sizes in ([1] * end, [2] * end, [3] * end, draw.choices(range(1, 8), k=end)):
            borders = [0, *itertools.takewhile(end.__gt__, itertools.accumulate(sizes)), end]
            parts = ["".join(tokens[begin:stop]) for begin, stop in itertools.pairwise(borders)]
            assert merged(events_of(parser_of(transcript), parts, cut)) == whole, (parts, cut)


@every("transcript", TRANSCRIPTS)
def test_a_reply_that_is_cut_anywhere_says_nothing_else(transcript: Transcript) -> None:
    """What was said before the cut is the beginning of what the whole reply says, but for what is still undecided."""
    whole = merged(events_of(parser_of(transcript), [transcript.reply]))
    for at in range(len(transcript.reply)):
        parser = parser_of(transcript)
        said = merged(parser.feed(transcript.reply[:at]))
        for part, all_of in zip(said[:-1], whole, strict=False):
            assert part == all_of
        assert len(said) <= len(whole)
        if said:
            assert str(whole[len(said) - 1][-1]).startswith(str(said[-1][-1]))
        starts = [event for event in [*said, *merged(parser.finish(cut=True))] if event[0] == "start"]
        assert len(starts) <= len(transcript.calls)


def test_each_format_has_a_transcript() -> None:
    tools = {choose(transcript.tools, "none", []).tools for transcript in TRANSCRIPTS}
    channels = {choose(transcript.tools, "none", []).channels for transcript in TRANSCRIPTS}
    reasoning = {choose("none", transcript.thinks, []).reasoning for transcript in TRANSCRIPTS}
    assert tools >= set(TOOL_ROWS)
    assert channels >= set(CHANNEL_ROWS)
    assert reasoning >= set(REASONING_ROWS)


def test_arguments_stream_while_they_are_written() -> None:
    """Not when they are complete: each part of the text that a client can use leads to an event at once."""
    for name, begin, pieces, seen in (
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": ',
            ['{"ci', 'ty": "P', "ar"],
            ['{"ci', 'ty": "P', "ar"],
        ),
        ("mistral", "[TOOL_CALLS]weather[ARGS]", ['{"ci', 'ty": "P', "ar"], ['{"ci', 'ty": "P', "ar"]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\n",
            ["Pa", 'r"', "is\n"],
            ["Pa", 'r\\"', "is"],
        ),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>", ["Pa", "r</arg"], ["Pa", "r"]),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>",
            ['{"ci', "ty"],
            ['{"ci', "ty"],
        ),
        ("gpt-oss", "<|channel|>commentary to=functions.weather<|message|>", ['{"ci', "ty"], ['{"ci', "ty"]),
    ):
        parser = parser_of(Transcript(name, ""))
        parser.feed(begin)
        for piece, expected in zip(pieces, seen, strict=True):
            assert [event for event in parser.feed(piece) if not isinstance(event, CallStart)] == [
                CallArguments(0, expected)
            ], (name, piece)


def test_ids_have_the_form_that_templates_need() -> None:
    def ids(name: str, reply: str, before: int = 0) -> list[str]:
        parser = choose(name, "none", []).parser(OPTIONS, "", before)
        assert parser is not None
        return [event.id for event in events_of(parser, [reply]) if isinstance(event, CallStart)]

    call = '{"name": "now", "arguments": {}}'
    (general,) = ids("hermes", f"<tool_call>{call}</tool_call>")
    assert general.startswith("call_")
    assert len(general) == 29
    (short,) = ids("mistral", f"[TOOL_CALLS][{call}]")
    assert len(short) == 9
    assert short.isalnum()
    assert ids("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]') != ["abcdefghi"]
    assert ids("mistral", '[TOOL_CALLS][{"id": "abcdefghi", "name": "now", "arguments": {}}]') == ["abcdefghi"]
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    section = "<|tool_calls_section_begin|>"
    assert ids("kimi_k2", f"{section}{begin}functions.now:7{middle}{{}}{end}", 3) == ["functions.now:7"]
    assert ids("kimi_k2", f"{section}{begin}now{middle}{{}}{end}{begin}now{middle}{{}}{end}", 3) == [
        "functions.now:3",
        "functions.now:4",
    ]


def test_reasoning_in_one_piece_or_as_text() -> None:
    transcript = Transcript("qwen", "<think>a b</think>\n\nc <tool_call>", thinks="qwen3")
    one = ParserOptions(USE, stream_reasoning=False)
    assert events_of(parser_of(transcript, one), transcript.reply)[0] == Reasoning("a b")
    text = ParserOptions(USE, separate_reasoning=False)
    assert merged(events_of(parser_of(transcript, text), transcript.reply)) == [("text", 0, transcript.reply)]
    inside = Transcript("qwen", '<think><tool_call>{"name": "now"}</tool_call></think>c', thinks="qwen3")
    assert merged(events_of(parser_of(inside, text), inside.reply)) == [("text", 0, inside.reply)]


def test_the_reply_has_one_call_if_several_are_not_allowed() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    options = ParserOptions(USE.__class__(USE.tools, parallel=False))
    events = events_of(parser_of(Transcript("qwen", ""), options), [f"a{call}{call}b"])
    assert merged(events) == [
        ("text", 0, "a"),
        ("start", 0, "now"),
        ("arguments", 0, "{}"),
        ("end", 0, False),
        ("text", 0, "b"),
    ]


def test_where_reasoning_was_is_known() -> None:
    reply = "<think>\nabc</think>\nd"
    parser = parser_of(Transcript("qwen", "", thinks="qwen3"))
    parser.feed(reply[:9])
    assert parser.thought() == [(0, 9)]
    parser.feed(reply[9:])
    parser.finish()
    assert parser.thought() == [(0, reply.index("\nd"))]


@pytest.mark.parametrize("name", ["none", "qwen"])
def test_a_format_without_anything_to_find_needs_no_parser(name: str) -> None:
    reply_format = choose(name, "none", [])
    assert reply_format.parser(ParserOptions(), "") is None
    assert reply_format.markers(ParserOptions()) == ()
