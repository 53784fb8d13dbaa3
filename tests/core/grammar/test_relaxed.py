"""Schemas of tools that are not strict: what a backend cannot enforce is left out and named, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from every import every

from srv.errors import GrammarError
from srv.grammar.backend import GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.relaxed import relaxed
from srv.grammar.source import from_json_schema, from_structural_tag
from srv.types import Vocabulary

BACKEND = make("llguidance", GrammarContext(Vocabulary(bytes(range(256)), [1] * 256, []), 257, (256,)))
DENSE = JsonSpacing(none=True)
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's


def tag(schema: Any, **more: Any) -> Any:
    content = {"type": "json_schema", "json_schema": schema, **more}
    tags = [{"type": "tag", "begin": "<", "content": content, "end": ">"}]
    form = {"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": True}
    return from_structural_tag({"type": "structural_tag", "format": form}, param="tool_choice")


def compiled(source: Any) -> Any:
    return BACKEND.compile(BACKEND.translate(source, DENSE))


def with_a(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False, **more}


SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
NUMERAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}
DEPENDENT = with_a({"type": "integer", "minimum": 5}, dependentRequired={key: ["a"] for key in "bcdef"})
MULTIPLE = with_a({"type": "integer", "minimum": 2**70, "multipleOf": 3})


@every(
    ("schema", "left_out", "right", "wrong"),
    [
        (with_a({"type": "integer"}), (), '{"a":1}', '{"a":"'),
        (with_a(SET), ("uniqueItems",), '{"a":["x","x"]}', '{"a":[1'),
        (with_a(NUMERAL), (f"pattern {DECIMAL}",), '{"a":"x"}', '{"a":n'),
        (with_a({"type": "string", "format": "unheard-of"}), ("format unheard-of",), '{"a":"x"}', '{"a":1'),
        (with_a({"oneOf": [{"type": "integer"}, {"type": "number"}]}), ("oneOf",), '{"a":1.5}', '{"a":"'),
        (with_a({"type": "string", "minLength": 2, "not": {"pattern": "aa"}}), ("not",), '{"a":"aa"}', '{"a":"a"'),
        (DEPENDENT, ("dependentRequired",), '{"a":5}', '{"a":4}'),
        (MULTIPLE, ("minimum",), '{"a":3}', '{"a":4}'),
        (
            with_a({"additionalProperties": {"type": "integer"}, "minProperties": 2}),
            ("minProperties",),
            '{"a":{}}',
            '{"a":{"b":"',
        ),
        (with_a({"type": "object", "$ref": "other.json"}), ("the schema",), '{"b":1}', "["),
    ],
)
def test_only_what_cannot_be_enforced_is_left_out(
    schema: Any, left_out: tuple[str, ...], right: str, wrong: str
) -> None:
    source, dropped = relaxed(tag(schema, strict=False), compiled)
    assert dropped == left_out
    matcher = compiled(source)
    assert matcher().accept(list(f"<{right}>".encode()))
    assert not matcher().accept(list(f"<{wrong}".encode()))


def test_a_strict_schema_is_enforced_or_refused() -> None:
    for more in ({"strict": True}, {}):
        source, dropped = relaxed(tag(with_a({"uniqueItems": True}), **more), compiled)
        assert not dropped
        with pytest.raises(GrammarError, match="uniqueItems"):
            compiled(source)


def test_a_schema_of_its_own_loses_what_cannot_be_enforced() -> None:
    source, dropped = relaxed(from_json_schema(with_a(SET), param="test", strict=False), compiled)
    assert dropped == ("uniqueItems",)
    assert compiled(source)().accept(list(b'{"a":["x","x"]}'))
    assert not compiled(source)().accept(list(b'{"a":[1'))
    partly = with_a({**SET, "maxItems": 3}, properties={"a": SET, "b": {"enum": ["x", "y"], "not": {"const": "x"}}})
    source, dropped = relaxed(from_json_schema(partly, param="test", strict=False), compiled)
    assert dropped == ("uniqueItems",)
    assert not compiled(source)().accept(list(b'{"a":[],"b":"x'))
    whole = from_json_schema(with_a({"type": "string"}), param="test", strict=False)
    assert relaxed(whole, compiled) == (whole, ())


@every(
    ("schema", "part"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"$ref": "other.json"}, "other.json"),
        ({"type": "objekt"}, "the name of a type"),
        ({"type": "object", "minProperties": "2"}, "minProperties"),
        ("[", "not JSON"),
        ({"uniqueItems": True, "title": "any"}, "uniqueItems"),
        ({"if": {"const": 1}, "then": {"const": 1}, "else": {"type": "string"}}, "if"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"not": {}}, "allows no text"),
        ({"not": True}, "allows no text"),
        ({"allOf": [{"not": {}}]}, "allows no text"),
        ({"anyOf": [{"not": {"title": "a"}}, False]}, "allows no text"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "allows no text"),
        (with_a({"not": {}}), "allows no text"),
        (with_a({"type": "null"}, required=["a", "b"]), "allows no text"),
        (with_a({"enum": ["x"], "not": {"const": "x"}}), "allows no text"),
        (with_a({"type": ["object", "null"], "not": {"type": ["null", "object"]}}), "allows no text"),
        # Also if a part has to be left out to see it.
        (
            with_a({}, properties={"s": SET, "a": {"type": "integer", "minimum": 5, "maximum": 3}}),
            "allows no text",
        ),
    ],
)
def test_a_schema_of_which_nothing_would_be_left_is_refused(schema: Any, part: str) -> None:
    with pytest.raises(GrammarError, match=part):
        relaxed(from_json_schema(schema, param="test", strict=False), compiled)


def test_what_is_no_schema_is_refused_all_the_same() -> None:
    with pytest.raises(GrammarError, match="the name of a type"):
        relaxed(tag({"type": "objekt"}, strict=False), compiled)
    with pytest.raises(GrammarError, match="not a boolean"):
        relaxed(tag({}, strict=1), compiled)


def test_other_sources_stay_as_they_are() -> None:
    source = from_json_schema(json.dumps({"const": '"strict"'}), param="test")
    assert relaxed(source, compiled) == (source, ())
