"""The grammar backend: what each kind of source allows, and what it refuses with a reason."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from every import every

from srv.errors import GrammarError
from srv.grammar.backend import GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.source import GrammarSource, Kind, from_choice, from_json_schema, from_structural_tag
from srv.server.request.grammars import AnswerCheck
from srv.types import Vocabulary

TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>", b"<tool>", b"</s>", b"hello", b"hel", b"lo!"]
END, TOOL, OTHER_END, HELLO = 256, 257, 258, 259
VOCABULARY = Vocabulary(b"".join(TOKENS), list(map(len, TOKENS)), [END, TOOL, OTHER_END])
WIDTH = 320  # of the logits
BACKEND = make("llguidance", GrammarContext(VOCABULARY, WIDTH, (END, OTHER_END)))
BYTES = make("llguidance", GrammarContext(Vocabulary(bytes(range(256)), [1] * 256, []), 257, (256,)))
SPACED = JsonSpacing()
OBJECT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CALL = {"begin": "<fn=f>", "schema": OBJECT, "end": "</fn>"}
LEGACY = {"type": "structural_tag", "structures": [CALL], "triggers": ["<fn="]}

SURROGATE = {"type": "structural_tag", "format": {"type": "const_string", "value": "\ud800"}}


def of(kind: Kind, text: str) -> GrammarSource:
    return GrammarSource(kind=kind, text=text, param="test")


def schema(value: Any, **options: Any) -> GrammarSource:
    return from_json_schema(value, param="test", **options)


def tag(form: dict[str, Any]) -> GrammarSource:
    return from_structural_tag({"type": "structural_tag", "format": form}, param="test")


def state(source: GrammarSource, text: str | list[int], spacing: JsonSpacing = SPACED) -> tuple[bool, bool]:
    """(whether the text is allowed, whether the output may end after it)."""
    matcher = BACKEND.compile(BACKEND.translate(source, spacing))()
    allowed = matcher.accept(text if isinstance(text, list) else list(text.encode()))
    return allowed, matcher.accepting


def allowed_next(matcher: Any) -> set[int]:
    masks = np.full((1, BACKEND.words), -1, dtype=np.int32)
    BACKEND.fill([matcher], masks)
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")).tolist())


@every(
    ("source", "complete", "wrong"),
    [
        (schema(OBJECT), '{"x": 1}', '{"y"'),
        (schema(json.dumps(OBJECT)), '{"x":12}', '{"x":"'),
        (schema({"type": "object"}), '{"any": [1, {}]}', "["),
        (schema(True), "[1, null]", "x"),
        (schema({"$ref": "#/$defs/t", "$defs": {"t": {"enum": ["a", 1]}}}), "1", "2"),
        (schema({"type": "string", "pattern": "^a+$"}), '"aaa"', '"b'),
        (schema({"type": "string", "format": "date"}), '"2026-11-26"', '"2026-13'),
        (schema({"type": "string", "format": "password"}), '"a b"', "1"),
        (schema({"anyOf": [{"type": "string", "format": "uri-reference"}, {"const": 1}]}), '"a b"', "2"),
        (tag({"type": "json_schema", "json_schema": {"items": {"type": "string", "format": "byte"}}}), '["a b"]', "[1"),
        (of("regex", r"^[a-z]+@x\.com$"), "ab@x.com", "ab@xy"),
        (of("regex", r"a/b\$"), "a/b$", "a/c"),
        (of("regex", r"(a+)+b"), "aaab", "c"),
        (from_choice(["yes", 'a|b"\n', "y"], param="test"), 'a|b"\n', "n"),
        (of("grammar", 'root ::= "a" | "b" root'), "bba", "c"),
        (of("grammar", 'start: "a" | "b" start'), "bba", "c"),
        (of("grammar", "start: NUMBER\nNUMBER: /[0-9]+/"), "12", "x"),
        (from_structural_tag(LEGACY, param="test"), 'hm <fn=f>{"x":1}</fn> and on', "hm <fn=g"),
        (tag({"type": "const_string", "value": "abc"}), "abc", "abd"),
        (tag({"type": "const_string", "value": "a\x7f"}), "a\x7f", "a\u007e"),
        (tag({"type": "regex", "pattern": r"a\\/b"}), "a\\/b", "a/"),
        (tag({"type": "regex", "pattern": r"a\/b"}), "a/b", "a\\"),
        (from_choice(["a\x7f"], param="test"), "a\x7f", "ab"),
        (
            tag(
                {
                    "type": "sequence",
                    "elements": [
                        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                        {
                            "type": "or",
                            "elements": [
                                {"type": "regex", "pattern": "a/b+"},
                                {"type": "grammar", "grammar": 'root ::= "x" | "y"'},
                                {"type": "json_schema", "json_schema": OBJECT},
                            ],
                        },
                    ],
                }
            ),
            "<t>hm </t</t>a/bb",
            "<t>hm</t>z",
        ),
        (
            tag(
                {
                    "type": "tags_with_separator",
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<a>",
                            "content": {"type": "json_schema", "json_schema": {}},
                            "end": "</a>",
                        }
                    ],
                    "separator": ",",
                    "at_least_one": True,
                }
            ),
            "<a>1</a>,<a>[2]</a>",
            "<a>1</a><a>",
        ),
    ],
)
def test_a_complete_text_is_accepted_and_a_wrong_one_is_not(source: GrammarSource, complete: str, wrong: str) -> None:
    assert state(source, complete) == (True, True)
    assert state(source, wrong) == (False, False)


@every(
    ("source", "part"),
    [
        (schema({"type": "objekt"}), "'type' is the name of a type, not 'objekt'"),
        (schema({"properties": {"a": {"type": ["string", "strin"]}}}), "at /properties/a"),
        (schema({"properties": ["a"]}), "'properties' is an object of schemas"),
        (
            schema({"items": [{"minLength": -1}]}),
            "'minLength' is a whole number that is not negative, not '-1' at /items/0",
        ),
        (schema({"anyOf": []}), "'anyOf' is an array of schemas that is not empty"),
        (schema({"required": "a"}), "'required' is an array of texts"),
        (schema({"type": "integer", "minimum": "1"}), "'minimum' is a number, not '1'"),
        (schema({"properties": {"a": "string"}}), "a schema is an object or a boolean, not 'string' at /properties/a"),
        (tag({"type": "json_schema", "json_schema": {"type": "objekt"}}), "the name of a type"),
        (schema({"not": {"pattern": "a"}}), "Unimplemented keys"),
        (schema({"type": "string", "format": "nope"}), "Unknown format"),
        (schema(False), "allows no text"),
        (schema("{"), "not JSON"),
        (schema("[]"), "not an object"),
        (schema({"x-guidance": {}}), "x-guidance"),
        (schema({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}), "allows no text"),
        (schema('{"items":' * 10_000 + "{}" + "}" * 10_000), "deep"),
        (of("regex", "(a"), "unclosed group"),
        (of("regex", r"(a)\1"), "backreferences"),
        (of("regex", "(?=a)b"), "look-around"),
        (of("regex", "(" * 50_000 + "a" + ")" * 50_000), "invalid regex"),
        (of("grammar", "nonsense"), "neither Lark nor EBNF"),
        (of("grammar", 'root ::= "a" missing'), "missing"),
        (of("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested too deeply"),
        (from_structural_tag("{}", param="test"), "structural_tag"),
        (from_structural_tag({**LEGACY, "triggers": ["<x"]}, param="test"), "trigger"),
        (from_structural_tag({**LEGACY, "more": 1}, param="test"), "'more'"),
        (tag({"type": "qwen_xml_parameter"}), "is not one of"),
        (of("structural_tag", json.dumps(SURROGATE)), "lone surrogate"),
        (tag({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": ""}), '"begin"'),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_reason(source: GrammarSource, part: str) -> None:
    with pytest.raises(GrammarError) as caught:
        BACKEND.compile(BACKEND.translate(source, SPACED))
    assert part in str(caught.value)
    assert "1 | start:" not in str(caught.value), "the client did not write this line"
    assert len(str(caught.value)) < 700


def test_large_and_ambiguous_grammars_compile_within_the_limits() -> None:
    many = [f"value number {number}" for number in range(10_000)]
    assert state(from_choice(many, param="test"), "value number 77") == (True, True)
    assert state(schema({"enum": many}), '"value number 9999"') == (True, True)
    assert state(of("regex", "((a{1,100}){1,100}){1,100}b"), "aab") == (True, True)


def test_white_space_is_that_of_the_request_else_of_the_server() -> None:
    """By default it is one blank, because models repeat it without an end."""
    for compact in ('{"x":1}', '{"x": 1}'):
        assert state(schema(OBJECT), compact) == (True, True)
    for wide in ('{"x":  ', '{"x":\n', "{\n", '{"x":\t'):
        assert not state(schema(OBJECT), wide)[0]
    indented = json.dumps({"x": 1}, indent=4)
    assert state(schema(OBJECT, whitespace_pattern=r" |\n {0,32}"), indented) == (True, True)
    assert not state(schema(OBJECT), '{"x": ', JsonSpacing(none=True))[0]
    assert state(schema(OBJECT), '{"x":_1}', JsonSpacing("_")) == (True, True)
    assert state(schema(OBJECT, whitespace_pattern="-"), '{"x":-1}', JsonSpacing("_")) == (True, True)
    assert state(schema(OBJECT, whitespace_pattern=""), '{"x":1}', JsonSpacing("_")) == (True, True)
    assert not state(schema(OBJECT, whitespace_pattern=""), '{"x": ')[0]
    assert not state(schema(OBJECT, whitespace_pattern="-"), '{"x":_1}', JsonSpacing("_"))[0]


def test_end_tokens_are_allowed_where_the_output_may_end_and_only_there() -> None:
    matcher = BACKEND.compile(BACKEND.translate(of("regex", "ab?"), SPACED))()
    assert allowed_next(matcher) == {ord("a")}
    matcher.accept([ord("a")])
    assert allowed_next(matcher) == {ord("b"), END, OTHER_END}
    matcher.accept([ord("b")])
    assert allowed_next(matcher) == {END, OTHER_END}


def test_tokens_of_several_bytes_are_allowed_and_special_ones_are_no_text() -> None:
    """Logits beyond the vocabulary are never allowed."""
    matcher = BACKEND.compile(BACKEND.translate(of("regex", "(hello|help|<tool>).*"), SPACED))()
    assert allowed_next(matcher) == {ord("h"), ord("<"), HELLO, HELLO + 1}
    matcher.accept([HELLO])
    assert TOOL not in allowed_next(matcher)
    assert max(allowed_next(matcher)) < len(TOKENS)


def test_a_special_token_in_a_structural_tag_is_that_token() -> None:
    form = {
        "type": "triggered_tags",
        "triggers": ["<tool>"],
        "tags": [
            {
                "type": "tag",
                "begin": "<tool>call:",
                "content": {"type": "json_schema", "json_schema": OBJECT},
                "end": "<tool>",
            }
        ],
        "at_least_one": True,
    }
    call = [*b"call:", *b'{"x":1}', TOOL]
    assert state(tag(form), [*b"hey ", TOOL, *call]) == (True, True)
    assert state(tag(form), [*b"hey "]) == (True, False)
    assert not state(tag(form), [TOOL, *b"cal:"])[0]


def test_a_failed_matcher_allows_the_end_alone() -> None:
    matcher = BACKEND.compile(BACKEND.translate(of("regex", "abc"), SPACED))()
    assert not matcher.accept([ord("x")])
    assert "does not allow token" in matcher.failure
    assert allowed_next(matcher) == {END, OTHER_END}
    assert not matcher.accept([ord("a")])
    assert not matcher.accepting


@every(
    ("source", "parts", "valid"),
    [
        (schema(OBJECT), ["why </think>", '{"x": 1}'], True),
        (schema(OBJECT), ["why </th", "ink>\n", "\n", ' {"x"', ": 1}"], True),
        (schema(OBJECT), ['why </think>\n\n{"x": 1}'], True),
        (schema(OBJECT), ["why </think>\n\n", "x"], False),
        (schema(OBJECT), ["why </think>\n\n"], False),
        (schema(OBJECT), ['{"x": 1}'], False),
        (of("regex", "\n+a"), ["why </think>\n", "\na"], True),
        (of("regex", "a b"), ["why </think>\n", "a", " ", "b"], True),
        (of("regex", "a b"), ["why </think>\n", "a", "b"], False),
        (of("regex", " {2}"), ["why </think> ", " "], True),
    ],
)
def test_an_answer_is_checked_after_the_white_space_of_the_token_before_it(
    source: GrammarSource, parts: list[str], valid: bool
) -> None:
    """A token such as ">" with two newlines ends the reasoning: the engine's grammar begins after it."""
    text = BACKEND.translate(source, SPACED)
    answer = AnswerCheck(BYTES.compile(text), "</think>")
    for part in parts:
        answer.feed(part)
    assert answer.valid is valid
