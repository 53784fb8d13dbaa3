"""Grammars of calls: they allow what the format of the model is, and only that, and the parser reads it."""

from __future__ import annotations

import json

import pytest
from every import every
from transcripts import PARIS, SCHEMA, Transcript, events_of, merged, parser_of

from srv.errors import RequestError
from srv.grammar.backend import GrammarContext, JsonSpacing, Matcher
from srv.grammar.registry import make
from srv.grammar.source import from_structural_tag
from srv.reply.formats import TOOL_NAMES, choose
from srv.reply.parser import ParserOptions
from srv.reply.tools import Choice, Tool, ToolUse
from srv.server.protocols.reply_reader import constrained
from srv.server.sampling_fields import Sampling
from srv.types import Vocabulary

END = 256
STRICT = {**SCHEMA, "required": ["city"], "additionalProperties": False}
WEATHER, NOW = Tool("weather", None, STRICT), Tool("now")
USE = ToolUse((WEATHER, NOW), Choice.REQUIRED)
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>"]
BACKEND = make(
    "llguidance", GrammarContext(Vocabulary(b"".join(TOKENS), list(map(len, TOKENS)), [END]), len(TOKENS), (END,))
)
FORMATS = {name: choose(name, "none", []) for name in TOOL_NAMES if name != "none"}
FORCED = [name for name, found in FORMATS.items() if (found.channels or found.tools).frame[0]]  # type: ignore[union-attr]


def matcher(name: str, use: ToolUse) -> Matcher:
    found = FORMATS[name].constraint(use, 4)
    assert found is not None
    source = from_structural_tag(found.tag, param=found.param)
    made: Matcher = BACKEND.compile(BACKEND.translate(source, JsonSpacing()))()
    return made


def accepts(name: str, use: ToolUse, text: str) -> tuple[bool, bool]:
    """(whether the text is allowed, whether the reply may end behind it)."""
    state = matcher(name, use)
    return state.accept(list(text.encode())), state.accepting


def call(name: str, tool: str, arguments: str) -> str:
    row = FORMATS[name].channels or FORMATS[name].tools
    assert row is not None
    begin, end = row.frame
    return f"{begin.replace('{name}', tool).replace('{index}', '4')}{arguments}{end}"


@every("name", FORCED)
def test_a_forced_reply_is_one_that_the_parser_reads(name: str) -> None:
    paris = call(name, "weather", json.dumps(PARIS))
    assert accepts(name, USE, paris) == (True, True)
    said = merged(events_of(parser_of(Transcript(name, "")), [paris]))
    assert said == [("start", 0, "weather"), ("arguments", 0, json.dumps(PARIS)), ("end", 0)]
    assert accepts(name, USE, "Text")[0] is False
    assert accepts(name, USE, call(name, "weather", '{"days": 2}'))[0] is False, "city is required"
    named = ToolUse(USE.tools, Choice.NAMED, "now")
    assert accepts(name, named, call(name, "now", "{}")) == (True, True)
    assert accepts(name, named, paris)[0] is False
    row = FORMATS[name].channels or FORMATS[name].tools
    assert row is not None
    assert accepts(name, USE, paris + paris)[0] is (not row.one_call)
    assert accepts(name, ToolUse(USE.tools, Choice.REQUIRED, parallel=False), paris + paris)[0] is False


@every("name", [name for name in FORCED if name not in ("llama3", "gpt-oss")])
def test_strict_tools_leave_text_free(name: str) -> None:
    use = ToolUse((Tool("weather", None, STRICT, strict=True), NOW))
    assert accepts(name, use, "Just text.") == (True, True)
    assert accepts(name, use, "I look." + call(name, "weather", '{"city": "Paris"}')) == (True, True)
    assert accepts(name, use, call(name, "weather", '{"days": 2}'))[0] is False
    assert accepts(name, use, call(name, "now", '{"any": [1]}')) == (True, True)


@every("name", [*(name for name in FORMATS if name not in FORCED), "llama3", "gpt-oss"])
def test_formats_without_such_a_grammar_say_so(name: str) -> None:
    uses = [ToolUse((Tool("now", strict=True),))] if name in FORCED else [USE, ToolUse((Tool("now", strict=True),))]
    for use in uses:
        with pytest.raises(RequestError, match=f"calls in the format {name} cannot be constrained") as caught:
            FORMATS[name].constraint(use, 0)
        assert caught.value.code == "not_implemented"


def test_a_reply_without_force_is_free() -> None:
    for use in (ToolUse(), ToolUse((NOW,)), ToolUse((Tool("now", strict=True),), Choice.NONE)):
        assert FORMATS["qwen"].constraint(use, 0) is None


def test_grammars_begin_behind_the_reasoning() -> None:
    found = choose("qwen", "qwen3", [])
    options = ParserOptions(USE)
    for prompt, begins_after in (("x<think>\n", "</think>"), ("x", ""), ("<think>\n\n</think>\n", "")):
        source = constrained(Sampling(), found, options, prompt, 0).grammar
        assert source is not None
        assert source.begins_after == begins_after
        own = Sampling(grammar=from_structural_tag({"a": 1}, param="structural_tag"))
        later = constrained(own, found, ParserOptions(), prompt, 0).grammar
        assert later is not None
        assert later.begins_after == begins_after
        with pytest.raises(RequestError, match="structural_tag is refused with tool_choice: both constrain"):
            constrained(own, found, options, prompt, 0)
