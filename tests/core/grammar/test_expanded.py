"""Keywords that libraries lack, written with others: the same values are valid, by a validator of its own."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import jsonschema
from every import every

from srv.grammar.backend import GrammarContext, JsonSpacing
from srv.grammar.expanded import expand
from srv.grammar.registry import make
from srv.grammar.source import from_json_schema
from srv.types import Vocabulary

BACKEND = make("llguidance", GrammarContext(Vocabulary(bytes(range(256)), [1] * 256, []), 257, (256,)))
LEAVES: list[Any] = [None, True, False, 0, 1, 2.5, -3, "", "a", "ab", "b", "x-1", [], {}]
ARRAYS: list[Any] = [list(array) for size in (1, 2, 3) for array in product(["a", "b", 1, True], repeat=size)]
PARTS = [{}, {"a": 1}, {"a": 2}, {"a": "x"}, {"a": None}]
OBJECTS: list[Any] = [
    {**a, **b, **c} for a, b, c in product(PARTS, ({}, {"b": 1}, {"b": "y"}), ({}, {"c": True}, {"c": "zz"}))
]
VALUES = [*LEAVES, *ARRAYS, *OBJECTS]
AB = {"type": "object", "properties": {"a": {"enum": [1, 2, "x"]}, "b": {}, "c": {}}}
CLOSED = {**AB, "additionalProperties": False}
OPEN_A = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}
IF_A_IS_1 = {"properties": {"a": {"const": 1}}, "required": ["a"]}
ONES = {"$defs": {"e": {"enum": ["b", 1.0]}}}
UP_TO_3, NO_MORE = {"maxItems": 3}, {"minContains": 1, "maxContains": 2}
NONE_OF = {"contains": {"type": "integer"}, "minContains": 0, "maxContains": 0}


@every(
    "schema",
    [
        {"not": {"type": "string"}},
        {"not": {"type": ["object", "array", "number"]}},
        {"type": ["string", "null", "integer"], "not": {"type": "number"}},
        {"enum": ["a", 1, None, 2.5], "not": {"type": "integer"}},
        {"not": False, "type": "string"},
        {"enum": ["a", "b", 1], "not": {"const": 1.0}},
        {"type": "boolean", "not": {"enum": [True, "a"]}},
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 2, "not": {"enum": [0, "a", 1]}},
        {"type": "integer", "not": {"const": 1}},
        {"type": "string", "not": {"const": ""}},
        {"type": "string", "maxLength": 3, "not": {"enum": ["a", "x-1", "abc"]}},
        {"type": "string", "not": {"const": 5}},
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
        {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True, "$defs": {"e": {"enum": ["a", "b"]}}},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1},
        {"type": "array", "uniqueItems": False},
        {"type": "array", "items": {"enum": ["a", "b", 1, 2, 3, 4, 5, 6, 7, 8]}, "uniqueItems": True, "maxItems": 2},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 3}, "uniqueItems": True},
        {"type": "array", "items": {"anyOf": [{"const": "a"}, {"$ref": "#/$defs/e"}]}, "uniqueItems": True, **ONES},
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "contains": {"enum": ["b", 1.0]}},
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "contains": {}, "minContains": 2},
        {"type": "array", "contains": {"const": "a"}, "maxItems": 3},
        {"type": "array", "contains": {"type": "string"}, "minContains": 2, "minItems": 2, "maxItems": 3},
        {"type": "array", "items": {"type": ["string", "integer"]}, "contains": {"enum": ["b", 1]}, "maxItems": 2},
        {
            "type": "array",
            "items": {"enum": ["a", "b", 1]},
            "contains": {"enum": ["b", 5]},
            "maxContains": 1,
            **UP_TO_3,
        },
        {"type": "array", "items": {"type": "string"}, "contains": {"minLength": 1, "type": "string"}, "maxItems": 2},
        {
            "type": "array",
            "items": {"type": ["string", "integer"]},
            "contains": {"type": "string"},
            **UP_TO_3,
            **NO_MORE,
        },
        {"type": "array", "items": {"type": ["string", "integer"]}, **NONE_OF},
        {"type": "array", "contains": {"const": "a"}, "minContains": 0},
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "contains": {"enum": ["a", "b", 1]}, **NO_MORE},
        {"type": "array", "contains": True, "minContains": 2},
        {"type": "array", "items": {"type": "string"}, "minContains": 2, "maxContains": 1},
        {**AB, "dependentRequired": {"a": ["b"]}},
        {**CLOSED, "dependentRequired": {"a": ["b"], "b": ["a"], "c": ["a"]}},
        {**CLOSED, "required": ["a"], "dependentRequired": {"a": ["b"], "c": []}},
        {**CLOSED, "dependentSchemas": {"a": {"properties": {"b": {"type": "string"}}}}},
        {**AB, "if": IF_A_IS_1, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
        {**AB, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
        {**CLOSED, "required": ["a"], "if": IF_A_IS_1, "then": {"properties": {"b": {"type": "string"}}}},
        {**CLOSED, "if": IF_A_IS_1, "else": {"properties": {"b": {"type": "string"}}}},
        {**OPEN_A, "if": IF_A_IS_1, "then": {"required": ["b"]}},
        {**CLOSED, "if": IF_A_IS_1, "then": {"required": ["b"]}, "dependentRequired": {"b": ["c"]}},
        {**CLOSED, "if": True, "then": {"required": ["b"]}},
        {"type": "string", "then": {"const": "a"}},
        {
            "type": "object",
            "properties": {"a": {**AB, "dependentRequired": {"a": ["b"]}}, "b": {"not": {"type": "null"}}},
        },
    ],
)
def test_the_same_values_are_valid(schema: dict[str, Any]) -> None:
    expanded = json.loads(json.dumps(schema))
    expand(expanded)
    left = {
        "not",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "then",
        "else",
    }
    assert not any(f'"{name}"' in json.dumps(expanded) for name in left)
    before, after = (jsonschema.Draft202012Validator(form) for form in (schema, expanded))
    differing = [value for value in VALUES if before.is_valid(value) != after.is_valid(value)]
    assert not differing
    new = BACKEND.compile(BACKEND.translate(from_json_schema(schema, param="test"), JsonSpacing()))
    for value in VALUES:
        matcher = new()
        text = json.dumps(value).encode()
        assert (matcher.accept(list(text)) and matcher.accepting) <= before.is_valid(value), value


@every(
    "schema",
    [
        {"type": "number", "not": {"type": "integer"}},
        {"not": {"pattern": "a"}},
        {"type": "string", "pattern": "^a", "not": {"const": "ab"}},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "array", "items": {"enum": list(range(6))}, "uniqueItems": True},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True},
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "contains": {"pattern": "a"}},
        {"type": "array", "contains": {"const": "a"}},
        {"type": "array", "contains": {"const": "a"}, "maxItems": 7},
        {"contains": {"const": "a"}, "maxItems": 2},
        {"type": "array", "contains": {"const": "a"}, "minContains": 3, "maxItems": 2},
        {"type": "array", "contains": {"pattern": "a"}, "maxContains": 1, "maxItems": 2},
        {"type": "array", "prefixItems": [{}], "contains": {"const": "a"}, "maxItems": 2},
        {"type": "object", "dependentRequired": {key: ["z"] for key in "abcde"}},
        {"dependentRequired": {"a": ["b"]}},
        {**AB, "if": {"required": ["c"]}, "then": {"required": ["b"]}},
        {**AB, "if": {"properties": {"a": {"pattern": "x"}}}, "then": {"required": ["b"]}},
        {
            **AB,
            "properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}},
            "dependentRequired": {"a": ["b"]},
        },
    ],
)
def test_what_has_no_such_form_stays(schema: dict[str, Any]) -> None:
    expanded = json.loads(json.dumps(schema))
    expand(expanded)
    assert expanded == schema
