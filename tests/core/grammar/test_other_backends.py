"""The backends on XGrammar and outlines-core: they allow what llguidance allows, or refuse a source with a reason."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from every import every

from srv.errors import GrammarError
from srv.grammar.backend import GrammarBackend, GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.source import GrammarSource, Kind, from_choice, from_json_schema, from_structural_tag
from srv.types import Vocabulary

TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>", b"<tool>", b"</s>", b"hello", b"hel", b"lo!"]
END, TOOL, OTHER_END, HELLO, HEL = 256, 257, 258, 259, 260
VOCABULARY = Vocabulary(b"".join(TOKENS), list(map(len, TOKENS)), [END, TOOL, OTHER_END])
WIDTH = 320  # of the logits
NAMES = ("xgrammar", "outlines")
CONTEXT = GrammarContext(VOCABULARY, WIDTH, (END, OTHER_END))
OBJECT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "abc"}}
TAG_OF_TEXT = {"begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}
_BACKENDS: dict[str, GrammarBackend] = {}


def backend(name: str) -> GrammarBackend:
    return _BACKENDS.get(name) or _BACKENDS.setdefault(name, make(name, CONTEXT))


DEFINITIONS = {"a": {"$anchor": "anchor", "enum": ["x"]}, "b": {"type": "null"}}


def of(kind: Kind, text: str) -> GrammarSource:
    return GrammarSource(kind=kind, text=text, param="test")


def schema(value: Any, **options: Any) -> GrammarSource:
    return from_json_schema(value, param="test", **options)


def in_tag(format_: dict[str, Any]) -> GrammarSource:
    return from_structural_tag({"type": "structural_tag", "format": format_}, param="test")


def matcher_of(name: str, source: GrammarSource, spacing: JsonSpacing = JsonSpacing()) -> Any:  # noqa: B008 - immutable
    return backend(name).compile(backend(name).translate(source, spacing))()


def allowed_next(name: str, matcher: Any) -> set[int]:
    masks = np.full((1, backend(name).words), -1, dtype=np.int32)
    backend(name).fill([matcher], masks)
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")).tolist())


@every("name", NAMES)
@every(
    ("source", "complete", "wrong"),
    [
        (schema(OBJECT), '{"x": 1, "y": "b"}', '{"x": 1, "y": "c"}'),
        (schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}), "[true,false]", "[1]"),
        (schema({"type": "string", "pattern": "^a+$"}), '"aaa"', '"b'),
        (schema({"type": "string", "pattern": "^(a|bc)$"}), '"bc"', '"b"'),
        (schema({"type": "string", "format": "date"}), '"2026-11-26"', '"2026-13'),
        (schema({"type": "string", "format": "password"}), '"a b"', "1"),
        (schema({"anyOf": [{"type": "integer"}, {"type": "null"}]}), "null", "true"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "null"}], "discriminator": {}}), "null", "true"),
        (schema({"type": "string", "format": "date"}), '"2024-02-29"', '"2023-02-29"'),
        (schema({"type": "string", "format": "ipv4"}), '"10.0.0.9"', '"10.0.0.09"'),
        (schema({"$ref": "#/$defs/t", "$defs": {"t": {"enum": ["a", 1]}}}), "1", "2"),
        (of("regex", "^a$|^b"), "b", "c"),
        (of("regex", r"[a-z]+@x\.com"), "ab@x.com", "ab@xy"),
        (of("regex", r"(a+)+b"), "aaab", "c"),
        (from_choice(["yes", 'a|b"\n', "y"], param="test"), 'a|b"\n', "n"),
    ],
)
def test_a_complete_text_is_accepted_and_a_wrong_one_is_not(
    name: str, source: GrammarSource, complete: str, wrong: str
) -> None:
    matcher = matcher_of(name, source)
    assert (matcher.accept(list(complete.encode())), matcher.accepting) == (True, True)
    assert matcher.accept([END])
    assert allowed_next(name, matcher) == {END, OTHER_END}
    other = matcher_of(name, source)
    assert (other.accept(list(wrong.encode())), other.accepting) == (False, False)
    assert "does not allow token" in other.failure
    assert allowed_next(name, other) == {END, OTHER_END}


@every(
    ("source", "complete", "wrong"),
    [
        (of("grammar", 'root ::= "a" | "b" root'), "bba", "c"),
        (of("grammar", 'start: "a" | "b" start'), "bba", "c"),
        (from_structural_tag(TAG, param="test"), "abc", "abd"),
        (schema({"type": "object", "minProperties": 1}), '{"any": [1]}', "{}"),
        (schema(True), "[1, null]", "x"),
        # What the library by itself reads differently: lengths, and optional groups in patterns.
        (schema({"type": "string", "maxLength": 5}), '"a b"', '"a\x05"'),
        (schema({"type": "string", "minLength": 2, "maxLength": 250}), f'"{"é" * 250}"', f'"{"é" * 251}'),
        (schema({"type": "string", "minLength": 120}), f'"{"a" * 130}"', f'"{"a" * 119}"'),
        (schema({"type": "string", "pattern": "^a(b+c+)?z$"}), '"abbcz"', '"acz"'),
        (schema({"type": "object", "patternProperties": {"^a(b+c+)?z$": {}}}), '{"az":1}', "["),
        (schema({"type": "string", "format": "date-time"}), '"2024-01-01T00:00:00Z"', '"2024-01-01T00:00:001'),
    ],
)
def test_xgrammar_has_grammars_and_tags_too(source: GrammarSource, complete: str, wrong: str) -> None:
    matcher = matcher_of("xgrammar", source)
    assert (matcher.accept(list(complete.encode())), matcher.accepting) == (True, True)
    assert not matcher_of("xgrammar", source).accept(list(wrong.encode()))


@every(
    ("name", "source", "part"),
    [
        *((name, schema({"type": "array", "uniqueItems": True}), "keyword 'uniqueItems'") for name in NAMES),
        *((name, schema({"type": "number", "multipleOf": 2}), "keyword 'multipleOf'") for name in NAMES),
        *(
            (name, schema({"type": "array", "items": {"oneOf": [{}, {}]}}), "keyword 'oneOf' at /items")
            for name in NAMES
        ),
        *((name, schema({"type": "string", "format": "nope"}), "format 'nope'") for name in NAMES),
        *((name, schema({"type": "string", "pattern": "a", "minLength": 2}), "together with") for name in NAMES),
        *((name, schema({"anyOf": [{}], "properties": {}}), "beside other keywords") for name in NAMES),
        *((name, schema({"type": "object", "required": ["z"]}), "'z' is required") for name in NAMES),
        *((name, schema({"type": "strin"}), "strin") for name in NAMES),
        *((name, schema({"type": "integer", "enum": ["a", 1]}), "have the stated type") for name in NAMES),
        *((name, schema({"enum": ["abcdef"], "minItems": 3}), "without the type array") for name in NAMES),
        *((name, schema({"type": "string", "const": "abc", "maxLength": 2}), "beside 'maxLength'") for name in NAMES),
        *((name, schema({"maxLength": 2}), "without the type string") for name in NAMES),
        ("xgrammar", schema({"type": "string", "pattern": "^[^x]{1,200}$"}), "no repetition beyond 100"),
        *((name, schema({"type": "object", "minProperties": 2}), "'minProperties' cannot") for name in NAMES),
        ("xgrammar", schema({"type": "object", "properties": {"é": {"type": "null"}}}), "in closed objects only"),
        ("xgrammar", schema({"minimum": 5}), "without the type integer or number"),
        ("xgrammar", schema({"type": "object", "properties": {}, "patternProperties": {}}), "together with"),
        *((name, schema({"type": "string", "pattern": "a$b"}), "anchors within") for name in NAMES),
        *((name, schema({"type": "string", "pattern": "(^|x)b"}), "anchors within") for name in NAMES),
        *((name, of("regex", "a^b"), "anchors within") for name in NAMES),
        ("xgrammar", in_tag({"type": "regex", "pattern": "a^b"}), "anchors within"),
        ("xgrammar", in_tag({"type": "json_schema", "json_schema": False}), "allows no text"),
        ("xgrammar", in_tag({"type": "json_schema", "json_schema": []}), "a schema is an object"),
        ("xgrammar", in_tag({"type": "json_schema", "json_schema": {}, "any_order": True}), "the field 'any_order'"),
        ("xgrammar", in_tag({"type": "qwen_xml_parameter", "json_schema": {}}), "not in 'qwen_xml_parameter'"),
        *(
            (name, schema({"$ref": reference, "$defs": DEFINITIONS, "default": {"oneOf": [{}]}}), f"{reference!r}")
            for name in NAMES
            for reference in (
                "#anchor",
                "https://example.com/a",
                "other.json#/a",
                "a",
                "",
                "#/$defs/absent",
                "#/default",
            )
        ),
        *((name, schema({"anyOf": [{"$ref": "#b"}]}), "the reference '#b' at /anyOf/0") for name in NAMES),
        *(
            (name, schema({"anyOf": [{"$id": "b", "type": "null"}]}), "'$id' below the root at /anyOf/0")
            for name in NAMES
        ),
        *((name, schema(False), "allows no text") for name in NAMES),
        *((name, schema("{"), "not JSON") for name in NAMES),
        *((name, schema('{"items":' * 10_000 + "{}" + "}" * 10_000), "deep") for name in NAMES),
        *((name, of("regex", r"(a)\1"), "") for name in NAMES),
        *((name, of("regex", "(?=a)b"), "") for name in NAMES),
        ("xgrammar", of("grammar", 'root ::= "a" missing'), "missing"),
        ("xgrammar", schema(OBJECT, whitespace_pattern=" "), "no pattern for white space"),
        ("xgrammar", of("structural_tag", "{}"), ""),
        ("xgrammar", in_tag({"type": "json_schema", "json_schema": {"not": {"pattern": "a"}}}), "keyword 'not'"),
        ("outlines", schema({"type": "number", "minimum": 3}), "keyword 'minimum'"),
        ("outlines", of("grammar", 'root ::= "a"'), "regular languages only"),
        ("outlines", of("structural_tag", json.dumps(TAG)), "regular languages only"),
    ],
)
def test_what_would_be_passed_over_is_refused(name: str, source: GrammarSource, part: str) -> None:
    with pytest.raises(GrammarError) as caught:
        backend(name).compile(backend(name).translate(source, JsonSpacing()))
    assert part in str(caught.value)
    assert len(str(caught.value)) < 700


@every("name", NAMES)
def test_white_space_is_bounded_and_can_be_disabled(name: str) -> None:
    one = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
    assert matcher_of(name, schema(one)).accept(list(b'{"x": 1}'))
    assert not matcher_of(name, schema(one)).accept(list(b'{"x":  '))
    assert not matcher_of(name, schema(one), JsonSpacing(none=True)).accept(list(b'{"x": '))
    assert matcher_of(name, schema(one), JsonSpacing(none=True)).accept(list(b'{"x":1}'))


def test_outlines_takes_a_pattern_for_white_space() -> None:
    one = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    assert matcher_of("outlines", schema(one), JsonSpacing("_*")).accept(list(b'{"x":_1}'))
    assert not matcher_of("outlines", schema(one, whitespace_pattern="-*"), JsonSpacing("_*")).accept(list(b'{"x":_'))


@every("name", NAMES)
def test_end_tokens_are_allowed_where_the_output_may_end_and_only_there(name: str) -> None:
    """Tokens of several bytes are allowed, and logits beyond the vocabulary never are."""
    matcher = matcher_of(name, of("regex", "hello|helps?"))
    assert allowed_next(name, matcher) == {ord("h"), HELLO, HEL}
    assert matcher.accept([HEL])
    assert allowed_next(name, matcher) == {ord("l"), ord("p")}
    assert matcher.accept([ord("p")])
    assert allowed_next(name, matcher) == {ord("s"), END, OTHER_END}
    assert not matcher_of(name, of("regex", "hello|helps?")).accept([HEL, END])


CALL = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {}}, "required": ["x"]}
ONE_FORM = in_tag({"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": CALL}, "end": ">"})
OTHER_FORM = from_structural_tag(
    {
        "type": "structural_tag",
        "structures": [{"begin": "<", "schema": CALL, "end": ">"}],
        "triggers": ["<"],
        "at_least_one": True,
    },
    param="test",
)


@every("source", [ONE_FORM, OTHER_FORM])
@every("name", ["llguidance", "xgrammar"])
@every(
    ("text", "default", "none"),
    [
        ('<{"x": 1}>', True, False),
        ('<{"x":1,"y":[1, {"b": "c"}]}>', True, False),
        ('<{"x":1,"y":[1,{"b":"c","d":1}]}>', True, True),
        ('<{"x":1,"z":2}>', True, True),
        ('<{"x":   1}>', False, False),
        ('<{"x":1.5}>', False, False),
    ],
)
def test_schemas_in_structural_tags_have_the_white_space_of_others(
    name: str, source: GrammarSource, text: str, default: bool, none: bool
) -> None:
    for spacing, allowed in ((JsonSpacing(), default), (JsonSpacing(none=True), none), (JsonSpacing(""), none)):
        matcher = matcher_of(name, source, spacing)
        assert (matcher.accept(list(text.encode())) and matcher.accepting) is allowed


def test_a_pattern_of_white_space_is_enforced_in_structural_tags_or_refused() -> None:
    lines = JsonSpacing(r" |\n {0,32}")
    assert matcher_of("llguidance", ONE_FORM, lines).accept(list(b'<{\n    "x": 1\n}>'))
    with pytest.raises(GrammarError, match="no pattern for white space"):
        matcher_of("xgrammar", ONE_FORM, lines)
    assert matcher_of("xgrammar", in_tag({"type": "const_string", "value": "abc"}), lines)  # it has no schema


TEXTS = ("", "a", "b", "aa", "ab", "ba", "xab", "bc", "a$b", "^a", "abc")


@every(
    "pattern",
    [
        "a",
        "^a",
        "a$",
        "^a$",
        "^a|b$",
        "^(a|b)$",
        "^a$|^b$",
        "^(?:a|b)",
        r"a\$",
        "[$^]",
        "",
        "^",
        "$",
        "^^a$$",
        "a|b|^$",
    ],
)
@every("name", ["llguidance", *NAMES])
def test_a_pattern_is_found_anywhere_but_for_its_anchors(name: str, pattern: str) -> None:
    new = backend(name).compile(backend(name).translate(schema({"type": "string", "pattern": pattern}), JsonSpacing()))
    for text in TEXTS:
        matcher = new()
        accepts = matcher.accept(list(json.dumps(text).encode())) and matcher.accepting
        assert accepts == (re.search(pattern, text) is not None), (name, pattern, text)


PATTERNS = (
    *(r"^[!-~]$", r"^[\s\S]$", '^a[\\n"]*b$', '^"?a"?$', '^("a")?b$', '^[^"]+$', r"^[^\n]$", '^(?:"|x){2}$', r"^\/a$"),
    *(r"^[\w.-]+$", r"^\x41\u0042$", r"^[\u0041-\u0043]$", r"\\", r"^C:\\[a-z]{3}$", r"^[\]]$", '^a|"$', "^[a-]$"),
    *(r"^\x22$", r"^\u0022$", "^\n$", r"^\t$", r"^[^\s\"]+$", r"^\D$", r"^\W$", r"^\S$", r"^.{2}$", r"^[\d\-]+$", "\n"),
    *("^[[:alpha:]]$", "^a&&b$", "^[a&&b]$", "^[^]$", "^[+--]$", r"^[^\x22\x5c]+$", "^😀$", "^[à-ÿ]$", "^<a>~# $"),
)
STRINGS = (
    *("a", '"', '"a"', "b", '"a"b', "\n", "a\nb", 'a"b', 'a"\n"b', '"x', "x", '""', "/a", "AB", "B", "C:\\abc", "\\"),
    *("]", "-", " ", "12", "é", "\0", "a]", ":]", "1-2", "a&&b", "&", "+", ",", "😀", "\t", "ab", "<a>~# "),
)


@every("pattern", PATTERNS)
@every("name", ["llguidance", *NAMES])
def test_a_pattern_is_that_of_the_string_and_not_of_its_json(name: str, pattern: str) -> None:
    """What is accepted is JSON and matches; `re` reads these patterns as ECMA-262 does after some replacements."""
    new = backend(name).compile(backend(name).translate(schema({"type": "string", "pattern": pattern}), JsonSpacing()))
    python = pattern.removesuffix("$")
    for theirs, ours in (("[^]", r"[\s\S]"), ("[[:alpha:]]", r"[\[:alph]\]"), ("[a&&b]", "[a&b]"), ("--", r"-\-")):
        python = python.replace(theirs, ours)
    compiled = re.compile(python + (r"\Z" if pattern.endswith("$") else ""), re.ASCII)
    count = 0
    for text in STRINGS:
        for written in (json.dumps(text, ensure_ascii=False), f'"{text}"'):
            matcher = new()
            if matcher.accept(list(written.encode())) and matcher.accepting:
                assert compiled.search(json.loads(written)), (name, pattern, written)
                count += 1
    assert count, (name, pattern)


@every(
    ("pattern", "part"),
    [
        ("\\", "a single backslash"),
        (r"^\a$", "the escape"),
        ("^[]$", "is empty"),
        ("^[b-a]$", "which is none"),
        (r"^\uD800$", "no character"),
    ],
)
@every("name", NAMES)
def test_patterns_that_have_no_json_text_are_refused(name: str, pattern: str, part: str) -> None:
    with pytest.raises(GrammarError, match=part):
        matcher_of(name, schema({"type": "string", "pattern": pattern}))


@every("name", ["llguidance", *NAMES])
def test_names_and_constants_are_json(name: str) -> None:
    names = ('a"b', "\\", "\n", "a.b")
    value = dict.fromkeys(names, 1)
    one = {"type": "object", "properties": {key: {"const": 1} for key in names}, "required": list(names)}
    right = json.dumps(value, separators=(",", ":"))
    for form in ({**one, "additionalProperties": False}, {"const": value}):
        new = backend(name).compile(backend(name).translate(schema(form), JsonSpacing(none=True)))
        for text, expected in ((right, True), (right.replace("a.b", "axb"), False), ('{"a"b":1', False)):
            assert new().accept(list(text.encode())) is expected, (form, text)
    for surrogate in ({"enum": ["\ud800"]}, {"type": "object", "properties": {"\ud800": {}}}):
        with pytest.raises(GrammarError, match="lone surrogate"):
            matcher_of(name, schema(surrogate))


def test_outlines_keeps_any_value_within_its_object() -> None:
    anything = {"type": "object", "properties": {"a": {"title": "A"}}, "required": ["a"], "additionalProperties": False}
    for text, expected in (("null", False), ("[", False), ('{"a":-7}', True), ('{"a":[1,"x"]}', True)):
        assert matcher_of("outlines", schema(anything)).accept(list(text.encode())) is expected, text


def test_formats_are_json() -> None:
    pointer = matcher_of("xgrammar", schema({"type": "string", "format": "json-pointer"}))
    assert not pointer.accept(list(b'"/\n'))
    for name, right, wrong in (
        ("time", '"22:14:28.5Z"', '"22:14:28' + "\\"),
        ("email", '"a.b@c.de"', '""'),
        ("uri", '"https://a.bc/d?e=f"', '"http://a.bc/' + "\\"),
    ):
        assert matcher_of("outlines", schema({"type": "string", "format": name})).accept(list(right.encode()))
        assert not matcher_of("outlines", schema({"type": "string", "format": name})).accept(list(wrong.encode()))


def test_patterns_of_outlines_allow_no_character_that_json_escapes() -> None:
    new = backend("outlines").compile(
        backend("outlines").translate(schema({"type": "string", "pattern": r"^.[^x]\S[!-~]$"}), JsonSpacing())
    )
    assert new().accept(list(b'"abcd"'))
    for wrong in (b'""', b'"a"', b'"ab"', b'"abc"', b'"\\', b'"a\n'):
        assert not new().accept(list(wrong))


NO_TEXT = (
    *(b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80", b"\xf0\x8f\xbf\xbf"),
    *(b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xff", b"\x80", b"\xc3b"),
)
FIRST_AND_LAST = "\x80\u07ff\u0800\u0fff\u1000\ud7ff\ue000\uffff\U00010000\U0003ffff\U00040000\U000fffff\U0010ffff"


@every("name", ("llguidance", *NAMES))
@every(
    ("source", "begin"),
    [
        (of("regex", r"[^\u00e9]*!"), ""),
        (of("regex", r"(x|\D){2,}"), "x"),
        (schema({"type": "string", "minLength": 1}), '"'),
        (schema({"type": "string", "pattern": "^[^a]*$"}), '"'),
        (schema({"type": "object", "patternProperties": {"^[^a]+$": {"type": "null"}}}), '{"'),
        (of("grammar", "start: /[^a]*/"), ""),
        (in_tag({"type": "regex", "pattern": "[^a]*"}), ""),
        (in_tag({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG_OF_TEXT]}), ""),
        (in_tag({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG_OF_TEXT]}), "<f>"),
    ],
)
def test_tokens_of_bytes_form_utf_8(name: str, source: GrammarSource, begin: str) -> None:
    """The masks of one byte after another: overlong forms, surrogates and what is beyond U+10FFFF are excluded."""

    def may_follow(data: bytes) -> bool:
        matcher = new()
        matcher.accept(list(begin.encode()))
        return all(byte in allowed_next(name, matcher) and matcher.accept([byte]) for byte in data)

    try:
        new = backend(name).compile(backend(name).translate(source, JsonSpacing()))
    except GrammarError:
        assert name == "outlines", "the others have such grammars"
        return
    assert not [data.hex(" ") for data in NO_TEXT if may_follow(data)]
    assert not [ascii(text) for text in "b" + FIRST_AND_LAST[1:] if not may_follow(text.encode())]


def test_a_token_may_end_within_a_character_and_another_may_go_on_there() -> None:
    tokens = [b"a\xe0", b"\xa0\x80b", b"\x80\x80b", b"\xa0", b"\x80", b"a", b"<end>", b""]
    context = GrammarContext(Vocabulary(b"".join(tokens), list(map(len, tokens)), [6]), 8, (6,))
    xgrammar = make("xgrammar", context)
    matcher = xgrammar.compile(xgrammar.translate(of("regex", "[^x]*"), JsonSpacing()))()
    seen = []
    for token in (0, 3, 4):
        masks = np.full((1, xgrammar.words), -1, dtype=np.int32)
        xgrammar.fill([matcher], masks)
        seen.append(set(np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")).tolist()))
        assert matcher.accept([token])
    assert [tokens_seen - {7} for tokens_seen in seen] == [{0, 5, 6}, {1, 3}, {3, 4}]
