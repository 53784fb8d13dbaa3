"""Which schemas of tools are refused, and where the error points."""

from __future__ import annotations

from typing import Any

import pytest
from every import every
from transcripts import SCHEMA

from srv.errors import RequestError
from srv.reply.formats import choose
from srv.reply.tool_schemas import fault_of_schema
from srv.reply.tools import Tool, ToolUse

_PROPERTY = {"type": "object", "properties": {"a": {"type": "objekt"}}}


@every(
    ("schema", "place"),
    [
        ({}, None),
        (SCHEMA, None),
        ({"type": ["object", "null"], "properties": {"a": True, "type": {"type": "string"}}}, None),
        ({"properties": {"a": {"items": [{"type": "string"}], "enum": []}}, "additionalProperties": False}, None),
        ({"type": "objekt"}, ".type"),
        ({"type": "array"}, ".type"),
        ({"type": None}, ".type"),
        ({"type": []}, ".type"),
        (_PROPERTY, ".properties.a.type"),
        ({"properties": [1]}, ".properties"),
        ({"properties": {"a": "string"}}, ".properties.a"),
        (
            {"properties": {"a": {"items": {"anyOf": [{}, _PROPERTY]}}}},
            ".properties.a.items.anyOf[1].properties.a.type",
        ),
        ({"anyOf": {}}, ".anyOf"),
        ({"required": "a"}, ".required"),
        ({"$defs": {"a": {"enum": "a"}}}, ".$defs.a.enum"),
    ],
)
def test_the_place_of_a_fault(schema: dict[str, Any], place: str | None) -> None:
    fault = fault_of_schema(schema)
    assert (fault and fault.place) == place


def test_the_error_names_the_field_of_the_protocol() -> None:
    tool = Tool("f", None, _PROPERTY, where="tools[0]", schema_field="input_schema")
    with pytest.raises(RequestError, match=r"tools\[0\].input_schema.properties.a.type is refused") as caught:
        choose("qwen", "none", []).check(ToolUse((tool,)))
    assert caught.value.param == "tools[0].input_schema"
