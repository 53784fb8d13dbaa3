"""Fields that constrain the output: a value that says nothing is refused; only null asks for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from every import every
from pydantic import TypeAdapter, ValidationError

from srv.grammar.source import GrammarSource, from_json_schema
from srv.server.request import grammar_fields as fields


@every(
    ("field", "value", "part"),
    [
        (fields.GuidedChoice, [], "at least one"),
        (fields.GuidedChoice, [""], "none empty"),
        (fields.GuidedRegex, "", "not empty"),
        (fields.Regex, "", "not empty"),
        (fields.Ebnf, "", "not empty"),
        (fields.GuidedGrammar, False, "not a boolean"),
        (fields.StructuralTag, [], "structural tag"),
        (fields.ResponseFormat, {}, "type"),
        (fields.TextFormat, {}, "type"),
        (fields.OutputFormat, {}, "json_schema"),
        (fields.StructuredOutputs, {}, "exactly one of"),
        (fields.StructuredOutputs, {"choice": []}, "at least one"),
        (fields.StructuredOutputs, {"regex": ""}, "not empty"),
    ],
)
def test_an_empty_value_is_refused(field: Any, value: object, part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(field).validate_python(value)
    assert part in str(caught.value)
    assert TypeAdapter(field).validate_python(None) is None


def test_a_json_object_may_have_a_schema() -> None:
    """As llama.cpp, Together and Fireworks take it."""
    schema = {"type": "object", "required": ["a"]}
    for field, param in ((fields.ResponseFormat, "response_format"), (fields.TextFormat, "text.format")):
        read = TypeAdapter[GrammarSource | None](field).validate_python
        assert read({"type": "json_object", "schema": schema}) == from_json_schema(schema, param=f"{param}.schema")
        for form in ({"type": "json_object"}, {"type": "json_object", "schema": None}):
            assert read(form) == from_json_schema({"type": "object"}, param=param)
        with pytest.raises(ValidationError, match="JSON schema as an object or as its text, not an array"):
            read({"type": "json_object", "schema": []})
        with pytest.raises(ValidationError, match="remove 'strict'"):
            read({"type": "json_object", "schema": schema, "strict": True})


def test_an_empty_pattern_of_white_space_means_none_in_both_fields() -> None:
    schema = from_json_schema({}, param="guided_json")
    body = SimpleNamespace(guided_json=schema, guided_whitespace_pattern="")
    constraint = fields.grammar_of(body)
    read = TypeAdapter[GrammarSource](fields.StructuredOutputs).validate_python
    other = read({"json": {}, "whitespace_pattern": ""})
    assert constraint is not None
    assert constraint.whitespace_pattern == other.whitespace_pattern == ""
    assert fields.grammar_of(SimpleNamespace(guided_json=schema, guided_whitespace_pattern=None)) == schema
