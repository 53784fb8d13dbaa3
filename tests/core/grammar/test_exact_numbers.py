"""Numbers beyond 2^53 in JSON schemas: exact in bounds, constants and enumerations, wherever they are."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from every import every

from srv.errors import GrammarError
from srv.grammar.backend import GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.source import from_json_schema, from_structural_tag
from srv.grammar.written import load
from srv.server.http.body import BodyLimits, parse
from srv.types import Vocabulary

END = 256
CONTEXT = GrammarContext(Vocabulary(bytes(range(256)), [1] * 256, []), 257, (END,))
BACKEND = make("llguidance", CONTEXT)
DENSE = JsonSpacing(none=True)
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
HUGE = {"type": "integer", "minimum": 10**29, "maximum": 10**30}


def accepts(schema: Any, text: str, spacing: JsonSpacing = DENSE, backend: Any = BACKEND) -> bool:
    matcher = backend.compile(backend.translate(from_json_schema(schema, param="test"), spacing))()
    return bool(matcher.accept(list(text.encode())) and matcher.accepting)


@every(
    ("schema", "right", "wrong"),
    [
        (HUGE, [10**29, 10**30, 5 * 10**29], [2**63 - 1, 10**29 - 1, 10**30 + 1]),
        ({"type": "integer", "minimum": -(2**63)}, [-(2**63), 0, 10**40], [-(2**63) - 1]),
        (INT64, [-(2**63), 2**63 - 1, 2**53 + 1], [2**63, -(2**63) - 1]),
        ({"type": "integer", "exclusiveMinimum": 2**63 - 1}, [2**63], [2**63 - 1]),
        ({"type": "integer", "exclusiveMaximum": -(2**70)}, [-(2**70) - 1], [-(2**70), 0]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, [2**53 + 1, 2**53 + 2], [2**53, 2**53 + 4]),
        ({"const": 2**63 + 1}, [2**63 + 1], [2**63, 2**63 + 2]),
        ({"enum": ["a", [10**30 + 1], {"b": 1}]}, ["a", [10**30 + 1], {"b": 1}], [[10**30], "b"]),
        ({"type": "number", "minimum": -(2**63)}, [-(2**63), 0, 10**20], [-(2**63) - 1]),
        ({"type": ["integer", "null"], "maximum": 2**64}, [2**64, None], [2**64 + 1]),
        ({"anyOf": [INT64, {"type": "null"}]}, [None, 2**63 - 1], [2**63, "x"]),
        ({"$ref": "#/$defs/i", "$defs": {"i": INT64}}, [2**63 - 1], [2**63]),
        ({"type": "array", "items": INT64, "minItems": 1, "maxItems": 2}, [[1], [1, 2**62]], [[], [1, 2, 3], [2**63]]),
        ({"type": "array", "items": INT64, "maxItems": 0}, [[]], [[1]]),
        ({"type": "array", "items": INT64, "maxItems": 1}, [[], [1]], [[1, 2], [2**63]]),
        ({"type": "integer", "multipleOf": 10**20}, [0, 10**20, -3 * 10**21], [10**19, 5, 10**20 + 1]),
        ({"type": "integer", "multipleOf": 25 * 10**18, "minimum": 0}, [0, 5 * 10**19], [25 * 10**17, -5 * 10**19]),
        ({"type": "integer", "multipleOf": 3 * 2**60, "minimum": 0, "maximum": 2**70}, [0, 9 * 2**60], [2**60]),
        ({"type": "integer", "multipleOf": 4, "minimum": 2**60 + 1}, [2**60 + 4], [2**60, 2**60 + 5, 2**60 + 6]),
        ({"type": "number", "multipleOf": 8, "maximum": 2**60}, [2**60, -8], [2**60 + 8, 4]),
        ({"allOf": [INT64, {"minimum": 2**60}, {"maximum": 2**61}]}, [2**60, 2**61], [2**60 - 1, 2**61 + 1]),
        ({"oneOf": [{**INT64, "minimum": 2**60}, {"type": "integer", "maximum": 0}]}, [2**60, -(2**70)], [1, 2**63]),
        ({"oneOf": [INT64, {"type": "string"}]}, [2**63 - 1, "x"], [2**63, True]),
        ({"anyOf": [{"minimum": 2**60}, {"maximum": -(2**60)}], "type": "integer"}, [2**60, -(2**60)], [0]),
        ({"$ref": "#/$defs/i", "minimum": 2**60, "$defs": {"i": INT64}}, [2**60, 2**63 - 1], [2**60 - 1, 2**63]),
        (
            {"allOf": [{"enum": [2**60, 2**60 + 1, "x"]}, {"type": "integer", "minimum": 2**60 + 1}]},
            [2**60 + 1],
            [2**60, "x"],
        ),
        ({"type": "number", "exclusiveMinimum": 2**60, "exclusiveMaximum": 2**60 + 2}, [2**60 + 1], [2**60, 2**60 + 2]),
    ],
)
def test_integers_are_exact_at_any_size(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert accepts(schema, json.dumps(value, separators=(",", ":"))), value
    for value in wrong:
        assert not accepts(schema, json.dumps(value, separators=(",", ":"))), value


@every("name", ["llguidance", "xgrammar", "outlines"])
def test_integers_of_many_digits_are_numbers(name: str) -> None:
    """They are enforced, or refused with a reason."""
    huge, backend = 10**400, make(name, CONTEXT)
    several: list[tuple[Any, str]] = [
        *(({"type": "integer", key: huge}, "7") for key in ("minimum", "maximum", "exclusiveMinimum", "multipleOf")),
        ({"type": "array", "minItems": huge}, "[]"),
        ({"type": "array", "items": {"type": "null"}, "maxItems": huge}, "[]"),
        ({"type": "array", "contains": {"const": 1}, "minContains": huge, "maxItems": 3}, "[]"),
        ({"type": "string", "minLength": huge}, '""'),
        ({"type": "string", "maxLength": huge}, '""'),
        ({"type": "object", "minProperties": huge}, "{}"),
        ({"type": "object", "maxProperties": huge}, "{}"),
    ]
    for schema, text in several:
        try:
            taken = accepts(schema, text, DENSE, backend)
        except GrammarError:
            continue
        assert taken is any(key.startswith("max") for key in schema), schema
    assert name != "llguidance" or accepts({"type": "integer", "minimum": -huge, "maximum": huge}, str(huge))
    with pytest.raises(GrammarError):
        accepts('{"type":"integer","not":{"const":1e400}}', "1", DENSE, backend)


def test_decimals_between_large_bounds() -> None:
    between = {"type": "number", "exclusiveMinimum": -0.25, "maximum": 2**60}
    for right in ("-0.24", "-0.0", "0", f"{2**60}.00"):
        assert accepts(between, right), right
    for wrong in ("-0.25", "-0.250", "-1", f"{2**60}.01"):
        assert not accepts(between, wrong), wrong
    schema = {"type": "number", "minimum": -2, "maximum": 2**60}
    for right in ("-2", "-2.00", "-1.99", "-0.5", "0.1", f"{2**60 - 1}.9", f"{2**60}.0"):
        assert accepts(schema, right), right
    for wrong in ("-2.01", "-3", f"{2**60}.1", "01"):
        assert not accepts(schema, wrong), wrong


HALF = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}


@every(
    ("schema", "right", "wrong"),
    [
        (HALF, ["0.5", "0.50", "0.0001"], ["0", "-0", "0.0", "0e0", "0.51", "1"]),
        ({**HALF, "minimum": 0}, ["0.1"], ["0"]),
        ({**HALF, "exclusiveMinimum": True, "minimum": 0}, ["0.1"], ["0"]),
        ({**HALF, "type": ["number", "null"]}, ["0.1", "null"], ["0", "true"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "null", '"a"', '{"b":[1]}'], ["0", "1"]),
        ({"type": "number", "minimum": -5.5, "exclusiveMaximum": -5}, ["-5.5", "-5.001"], ["-5", "-5.0", "-5.6"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.1"], ["-0", "0", "-0.0"]),
        ({"type": "number", "exclusiveMinimum": 318000, "maximum": 318000.1}, ["318000.1"], ["318000", "318000.0"]),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.1"], ["0"]),
        ({"$ref": "#/$defs/p", "maximum": 0.5, "$defs": {"p": {**HALF, "maximum": 9}}}, ["0.5"], ["0", "1"]),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"exclusiveMinimum": 0}}, "required": ["a"]},
                    {"properties": {"a": {"type": "number", "maximum": 0.5}}},
                ]
            },
            ['{"a":0.5}'],
            ['{"a":0}'],
        ),
        ({"anyOf": [HALF, False, {"not": {}}]}, ["0.1"], ["0"]),
        ({"properties": {"a": {"anyOf": [HALF, {"type": "null"}]}}}, ['{"a":0.5}', '{"a":null}', "1"], ['{"a":0}']),
        ({**HALF, "multipleOf": 0.1}, ["0.1", "0.30", "0.5"], ["0", "0.15", "0.6"]),
        ({"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1}, ["0", "0.99"], ["1", "-1", "-1.0"]),
        ('{"type":"number","minimum":0.1000000000000000000001}', ["0.1000000000000000000001"], ["0.1"]),
        ({"type": "number", "exclusiveMaximum": 1824.1370875569974}, ["1824.1370875569973"], ["1824.1370875569974"]),
        ({"enum": [{"a": 1824.1370875569974}, 1.5]}, ['{"a":1824.1370875569974}', "1.5"], ['{"a":1824.1370875569976}']),
        ('{"type":"integer","maximum":4.99999999999999999999}', ["4"], ["5"]),
        ({"type": "integer", "exclusiveMinimum": True, "minimum": 2**60}, [str(2**60 + 1)], [str(2**60)]),
        ({"minimum": 2**60}, [str(2**60), "null", '"a"', "[1]"], ["1", "1.5"]),
        (
            f'{{"type":"number","minimum":-{"1234567890" * 4}.5}}',
            [f"-{'1234567890' * 4}.5"],
            [f"-{'1234567890' * 4}.6", f"-{'1234567891' * 4}"],
        ),
    ],
)
def test_bounds_that_the_library_does_not_hold(schema: Any, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert accepts(schema, text), text
    for text in wrong:
        assert not accepts(schema, text), text


def test_no_number_is_beyond_its_bounds() -> None:
    """Random bounds near each other, in several spellings of the numbers around them."""
    draw = random.Random(0)
    for _ in range(150):
        low = Decimal(draw.choice([draw.randint(-9, 9), draw.randint(-(10**6), 10**6), draw.randint(-999, 999) / 100]))
        high = low + Decimal(draw.choice(["0.001", "0.25", "0.5", "1", "1.5", "12"]))
        low, high = (Decimal(f"{bound:.4f}").normalize() for bound in (low, high))
        keys = draw.choice(["minimum", "exclusiveMinimum"]), draw.choice(["maximum", "exclusiveMaximum"])
        schema = f'{{"type":"number","{keys[0]}":{low:f},"{keys[1]}":{high:f}}}'
        new = BACKEND.compile(BACKEND.translate(from_json_schema(schema, param="test"), DENSE))
        near = [
            (bound + step).normalize()
            for bound in (low, high)
            for step in map(Decimal, ("0", "0.0001", "-0.0001", "0.5"))
        ]
        for text in [
            f"{near_number:f}{end}" for near_number in near for end in ("", "0" if near_number % 1 else ".0", "e0")
        ] + ["0", "-0"]:
            number, matcher = Decimal(text), new()
            above = number > low if keys[0].startswith("ex") else number >= low
            under = number < high if keys[1].startswith("ex") else number <= high
            taken = matcher.accept(list(text.encode())) and matcher.accepting
            assert not taken or (above and under), (schema, text)


NESTED: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"id": INT64, "kind": {"enum": ["a", "b"]}, "more": {"type": "array", "items": HUGE}},
        "required": required,
        "additionalProperties": more,
    }
    for required, more in (
        (["id"], False),
        ([], False),
        (["id", "kind", "more"], False),
        (["kind"], {"type": "boolean"}),
        ([], INT64),
    )
] + [
    {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {
                    "i": INT64,
                    "b": {
                        "type": "object",
                        "properties": {"i": HUGE},
                        "required": ["i"],
                        "additionalProperties": False,
                    },
                },
                "required": ["b"],
                "additionalProperties": False,
            }
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    {  # parts of which all hold
        "allOf": [
            {"type": "object", "properties": {"id": INT64, "k": {"enum": ["a", "b"]}}, "required": ["id"]},
            {
                "properties": {"id": {"minimum": 2**60}, "n": {"type": "null"}},
                "additionalProperties": {"type": "string"},
            },
            {"required": ["k"], "properties": {"k": True, "id": {"type": "number"}}, "additionalProperties": False},
        ]
    },
    {  # alternatives that a property tells apart
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "v": HUGE}, "required": ["k", "v"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "w": INT64}, "required": ["k"]},
        ],
    },
    {  # two definitions that contain each other, of which one has a large number
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {
                "type": "object",
                "properties": {"b": {"$ref": "#/$defs/b"}, "id": HUGE},
                "required": ["id"],
                "additionalProperties": False,
            },
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2},
            "c": {"type": "string"},
        },
    },
]


@pytest.mark.parametrize("number", range(len(NESTED)))
def test_outputs_follow_the_whole_schema_around_a_large_integer(number: int) -> None:
    """Random walks, checked without the library; and what Python writes is allowed."""
    schema, choice, outputs = NESTED[number], random.Random(number), set()
    for spacing in (DENSE, JsonSpacing()):
        new = BACKEND.compile(BACKEND.translate(from_json_schema(schema, param="test"), spacing))
        for _ in range(12):
            matcher, output = new(), bytearray()
            masks = np.empty((1, BACKEND.words), dtype=np.int32)
            for _ in range(400):
                BACKEND.fill([matcher], masks)
                allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")).tolist()
                assert allowed, bytes(output)
                closing = [byte for byte in allowed if byte in (END, *b'"}]')]
                token = choice.choice(closing if closing and len(output) > 60 else allowed)
                if token == END:
                    break
                output.append(token)
                assert matcher.accept([token])
            else:
                continue
            text = output.decode("utf-8", "replace")
            jsonschema.validate(json.loads(text), schema)
            outputs.add(text)
            assert accepts(schema, text, spacing)
            if spacing is not DENSE:
                assert accepts(schema, json.dumps(json.loads(text), ensure_ascii=False), spacing) or "\\" in text, text
    assert len(outputs) > 3


@every(
    ("schema", "right", "wrong"),
    [
        ('{"const":1e5}', ["1e5"], ["100000", "1e05"]),
        ('{"enum":[1.10,2.0,3.5,{"a":[1E2]}]}', ["1.10", "2.0", "3.5", '{"a":[1E2]}'], ["1.1", "2", "100"]),
        ('{"allOf":[{"enum":[1.10,2.0]},{"maximum":1.5}]}', ["1.10"], ["1.1", "2.0"]),
        ('{"anyOf":[{"const":1.10},{"type":"array","items":{"type":"boolean"}}]}', ["1.10", "[true]"], ["1.1"]),
        # A part beside it that has no grammar here: a number that is equal.
        (
            '{"type":"object","patternProperties":{"^a$":{"const":1.10}},"additionalProperties":false}',
            ['{"a":1.1}'],
            [],
        ),
    ],
)
def test_constants_keep_their_text(schema: str, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert accepts(schema, text), text
    for text in wrong:
        assert not accepts(schema, text), text
    source = from_json_schema(load(schema), param="test")
    assert source.text == schema  # also where the schema comes as a value


def test_exponents_that_no_pattern_could_hold() -> None:
    """They are refused, or those of the float, and take no time."""
    for text in ("1e-999999999", "0e999999999", "1E-99999999999999999999", f"0.{'0' * 500}1"):
        schema = f'{{"type":"number","minimum":{text},"maximum":{2**60}}}'
        assert accepts(schema, "1.5"), text
        assert not accepts(schema, "-1"), text
        assert accepts(f'{{"const":{text}}}', text)
    with pytest.raises(GrammarError, match="too large"):
        accepts('{"enum":[1e999]}', "1")


def test_constants_of_a_request_keep_their_text() -> None:
    body = parse(b'{"temperature":0.50,"json_schema":{"enum":[1.10,1e5]}}', BodyLimits())
    assert isinstance(body, dict)
    assert from_json_schema(body["json_schema"], param="test").text == '{"enum":[1.10,1e5]}'
    assert json.dumps(body["temperature"]) == "0.5"


def test_a_large_integer_in_the_schema_of_a_call_is_exact() -> None:
    content = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"x": {"const": 2**60 + 1}}}}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    new = BACKEND.compile(BACKEND.translate(from_structural_tag(tag, param="test"), DENSE))
    assert new().accept(list(f'<{{"x":{2**60 + 1}}}>'.encode()))
    assert not new().accept(list(f'<{{"x":{2**60}'.encode()))


@every(
    ("schema", "part"),
    [
        ({"type": "integer", "multipleOf": 3 * 10**20}, "with 'multipleOf'"),
        ({"type": "integer", "multipleOf": 0.1, "maximum": 2**60}, "'multipleOf' that is not whole"),
        ({"type": "integer", "multipleOf": 7 * 10**20, "minimum": 1, "maximum": 10**20}, "allows no text"),
        ({"oneOf": [INT64, {"type": "number"}]}, "may overlap"),
        ({"allOf": [INT64, {"type": "string"}]}, "exclude each other"),
        ({"allOf": [INT64, {"multipleOf": 3}]}, "with 'multipleOf' 3"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, INT64]}}}, "contains itself"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.0001}, "unless few multiples"),
        ({"exclusiveMinimum": 0, "maximum": 0.5, "minProperties": 1}, "the keyword 'minProperties'"),
        ({"type": "integer", "minimum": 2**70, "maximum": 2**60}, "allows no text"),
        ({"const": 2**70, "not": {"pattern": "a"}}, "the keyword 'not'"),
    ],
)
def test_what_cannot_be_exact_is_refused(schema: Any, part: str) -> None:
    with pytest.raises(GrammarError) as caught:
        accepts(schema, "1")
    assert part in str(caught.value)


@every("name", ["xgrammar", "outlines"])
def test_other_backends_refuse_what_they_round(name: str) -> None:
    backend = make(name, CONTEXT)
    with pytest.raises(GrammarError, match=f"{name} does not enforce numbers beyond 9007199254740992 in 'const'"):
        accepts({"const": 2**53 + 1}, "1", DENSE, backend)
    for written in ("1.10", "1e5", *(["1.1"] if name == "xgrammar" else [])):
        with pytest.raises(GrammarError, match=f"{name} does not enforce the text of the number {written}"):
            accepts(f'{{"enum":[{{"a":{written}}}]}}', "1", DENSE, backend)
    assert accepts({"const": 1.5}, "1.5", DENSE, backend)
