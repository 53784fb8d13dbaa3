"""JSON schemas as clients send them, and random ones from a seed: for grammar backends, whose documents are validated.

written(): pydantic's output for its common types, tools, API descriptions, schemas of known documents
generated(seed): types, limits, formats, combinations, references, and keywords that no grammar library has
"""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import pathlib
import random
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, TypeAdapter

Schema = dict[str, Any]


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"
    BLUE = 3


class Money(BaseModel):
    model_config = ConfigDict(extra="forbid")
    amount: decimal.Decimal = Field(max_digits=8, decimal_places=2)
    currency: Literal["EUR", "USD", "JPY"]


class Person(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=20)]
    age: Annotated[int, Field(ge=0, lt=150)] | None = None
    born: datetime.date | None = None
    tags: set[Colour] = set()
    scores: dict[str, float] = {}


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: Annotated[float, Field(gt=0)]


class Square(BaseModel):
    kind: Literal["square"]
    side: Annotated[float, Field(gt=0, le=100)]


class Drawing(BaseModel):
    model_config = ConfigDict(extra="forbid")
    shapes: list[Annotated[Circle | Square, Field(discriminator="kind")]] = Field(max_length=3)
    background: Colour = Colour.RED


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    value: int
    children: list[Tree] = Field(default=[], max_length=2)


class Event(BaseModel):
    id: uuid.UUID
    at: datetime.datetime
    day: datetime.date
    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    path: pathlib.Path
    link: AnyUrl | None = None
    counter: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
    price: Money | None = None
    pair: tuple[int, bool]
    flags: frozenset[Literal["a", "b"]] = frozenset()


_TYPES: list[Any] = [
    *(Money, Person, Drawing, Tree, Event, Colour, list[Person], dict[str, Money], Person | Money | None),
    *(int, str, float, bool, list[int], set[bool], tuple[str, ...], Literal[1, "a", None], dict[str, list[bool]]),
    *(uuid.UUID, datetime.datetime, datetime.date, datetime.time, ipaddress.IPv4Address, bytes),
    *(Annotated[int, Field(multiple_of=5)], Annotated[str, Field(pattern=r"^[a-z]{2,4}-\d+$")]),
    Annotated[list[int], Field(min_length=1, max_length=3)],
]


def _object(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": required or list(properties), **more}


_STRICT = {"additionalProperties": False}
_TEXT: Schema = {"type": "string", "maxLength": 12}
_KNOWN: list[Schema] = [
    _object({"location": _TEXT, "unit": {"type": "string", "enum": ["c", "f"]}}, ["location"], **_STRICT),  # a tool
    _object(
        {
            "steps": {
                "type": "array",
                "items": _object({"explanation": _TEXT, "output": _TEXT}, **_STRICT),
                "maxItems": 2,
            }
        },
        **_STRICT,
        title="MathReasoning",
    ),
    {  # linked lists and trees, as in OpenAI's documentation
        **_object({"list": {"$ref": "#/$defs/node"}}, **_STRICT),
        "$defs": {
            "node": _object(
                {"value": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                **_STRICT,
            )
        },
    },
    _object({"label": _TEXT, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}, **_STRICT),
    {  # a pet store
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "components": {},
        **_object(
            {
                "id": {"type": "integer", "format": "int64", "minimum": 1},
                "name": {**_TEXT, "example": "doggie"},
                "category": {"$ref": "#/definitions/Category"},
                "status": {"enum": ["available", "pending", "sold"], "type": "string"},
            },
            ["name", "status"],
        ),
        "definitions": {"Category": _object({"id": {"type": "integer"}, "name": _TEXT}, ["id"])},
    },
    {  # allOf as inheritance
        "allOf": [
            _object({"type": {"enum": ["cat", "dog"]}, "name": _TEXT}),
            _object({"lives": {"type": "integer", "minimum": 0, "maximum": 9}}, ["lives"]),
        ]
    },
    _object({"latitude": {"type": "number", "minimum": -90, "maximum": 90}, "longitude": {"type": "number"}}),
    _object({"fruits": {"type": "array", "items": _TEXT}, "veggies": {"type": "array", "items": {"$ref": "#/$defs/v"}}})
    | {"$defs": {"v": _object({"veggieName": _TEXT, "veggieLike": {"type": "boolean"}})}},
    {  # GeoJSON
        "oneOf": [
            _object({"type": {"const": "Point"}, "coordinates": {"$ref": "#/$defs/p"}}, **_STRICT),
            _object(
                {
                    "type": {"const": "Line"},
                    "coordinates": {"type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 2},
                },
                **_STRICT,
            ),
        ],
        "$defs": {"p": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3}},
    },
    _object({"name": {"type": "string", "pattern": "^(@[a-z]+/)?[a-z]+$"}, "version": {"type": "string"}}, ["name"]),
    _object({"card": {"type": "string", "pattern": "^[0-9]{4}$"}, "address": _TEXT, "name": _TEXT}, ["name"])
    | {"dependentRequired": {"card": ["address"]}},
    _object({"country": {"enum": ["us", "ca", "nl"]}, "code": _TEXT}, ["country"])
    | {
        "if": {"properties": {"country": {"const": "us"}}, "required": ["country"]},
        "then": {"properties": {"code": {"pattern": "^[0-9]{5}$"}}},
        "else": {"required": ["code"]},
    },
    {
        "type": "array",
        "prefixItems": [{"type": "number"}, _TEXT, {"enum": ["NW", "SE"]}],
        "items": False,
        "minItems": 3,
    },
    {"type": "object", "patternProperties": {"^S_": {"type": "string"}, "^I_": {"type": "integer"}}, **_STRICT},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
    _object({"id": {"type": "string", "format": "uuid"}, "at": {"type": "string", "format": "date-time"}}, **_STRICT),
    {"type": ["string", "null"], "maxLength": 5},
    {"type": "string", "not": {"enum": ["admin", "root", ""]}, "maxLength": 8},
    {"type": "array", "items": {"enum": ["read", "write", "exec"]}, "uniqueItems": True, "minItems": 1},
    {"type": "integer", "minimum": 10**18, "maximum": 10**19, "multipleOf": 10**17},
]


def written() -> list[Schema]:
    return [*(TypeAdapter(schema_type).json_schema() for schema_type in _TYPES), *_KNOWN]


def generated(seed: int) -> Iterator[Schema]:
    """Schemas without end."""
    choice = random.Random(seed)
    while True:
        yield _Generator(choice).schema()


_PATTERNS = ("^[a-z]+$", "^\\d{3}-\\w{1,2}$", "a|b", "^(x|yz){1,3}", "[^0-9]$", "^[A-F0-9]{4}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "duration")
_NAMES = ("a", "b", "key", "x-1", "é")
_CONSTANTS: tuple[Any, ...] = (1, "a", "b", None, True, 1.5, 2.0, [1, "a"], {"a": 1}, -3, "", '\n"')


class _Generator:
    """One schema, whose definitions may refer to one another."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self._definitions: dict[str, Schema] = {}
        self._open = 0

    def schema(self) -> Schema:
        schema = self._any(3)
        return schema | ({"$defs": self._definitions} if self._definitions else {})

    def _any(self, depth: int) -> Schema:
        simple: list[Callable[[int], Schema]] = [self._text, self._number, self._listed, self._plain]
        deep = [self._properties, self._properties, self._array, self._union, self._reference, self._all, self._lacking]
        return self._choice.choice(deep if depth > 1 else simple + deep if depth else simple)(depth - 1)

    def _sometimes(self, chance: float = 0.4) -> bool:
        return self._choice.random() < chance

    def _plain(self, depth: int) -> Schema:
        return {"type": self._choice.choice(["boolean", "null", "integer", "number", ["string", "null"]])}

    def _text(self, depth: int) -> Schema:
        schema: Schema = {"type": "string"}
        if self._sometimes():
            return schema | {"pattern": self._choice.choice(_PATTERNS)}
        if self._sometimes():
            return schema | {"format": self._choice.choice(_FORMATS)}
        low = self._choice.randrange(4)
        return schema | {"minLength": low, "maxLength": low + self._choice.randrange(6)}

    def _number(self, depth: int) -> Schema:
        kind, scale = self._choice.choice(["integer", "number"]), self._choice.choice([10, 10, 1000, 1000, 2**60])
        low = self._choice.randrange(-scale, scale)
        high = low + self._choice.randrange(1, scale)
        schema: Schema = {"type": kind}
        if self._sometimes(0.7):
            schema[self._choice.choice(["minimum", "exclusiveMinimum"])] = low
        if self._sometimes(0.7):
            schema[self._choice.choice(["maximum", "exclusiveMaximum"])] = high + 1
        if self._sometimes(0.2):
            schema["multipleOf"] = self._choice.choice([2, 3, 10, 0.5] if kind == "number" else [2, 5, 7, 100])
        return schema

    def _listed(self, depth: int) -> Schema:
        if self._sometimes():
            return {"const": self._choice.choice(_CONSTANTS)}
        return {"enum": self._choice.sample(_CONSTANTS, self._choice.randrange(1, 5))}

    def _properties(self, depth: int) -> Schema:
        names = self._choice.sample(_NAMES, self._choice.randrange(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        if self._sometimes(0.7):
            schema["required"] = self._choice.sample(names, self._choice.randrange(1, len(names) + 1))
        if self._sometimes(0.7):
            schema["additionalProperties"] = self._choice.choice([False, False, {"type": "integer"}])
        if self._sometimes(0.1):
            schema[self._choice.choice(["minProperties", "maxProperties"])] = self._choice.randrange(1, 4)
        return schema

    def _array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "items": self._any(depth)}
        low = self._choice.randrange(3)
        if self._sometimes(0.3):
            schema |= {"prefixItems": [self._any(depth) for _ in range(self._choice.randrange(1, 3))]}
        if self._sometimes(0.7):
            schema |= {"minItems": low, "maxItems": low + self._choice.randrange(3)}
        return schema

    def _union(self, depth: int) -> Schema:
        name = self._choice.choice(["anyOf", "anyOf", "oneOf"])
        return {name: [self._any(depth) for _ in range(self._choice.randrange(2, 4))]}

    def _reference(self, depth: int) -> Schema:
        if len(self._definitions) > self._open:  # one that is finished, or is being made, which is a recursion
            return {"$ref": f"#/$defs/{self._choice.choice(list(self._definitions))}"}
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name].update(self._any(depth))
        return {"$ref": f"#/$defs/{name}"}

    def _all(self, depth: int) -> Schema:
        left = self._properties(depth)
        right = self._properties(depth)
        for side in (left, right):
            if side.get("additionalProperties") is False:
                del side["additionalProperties"]
        return {"allOf": [left, right]} if self._sometimes() else {**left, "allOf": [right]}

    def _lacking(self, depth: int) -> Schema:
        """With a keyword that no grammar library has."""
        schema = self._properties(depth)
        names = list(schema["properties"])
        match self._choice.randrange(5):
            case 0:
                return {
                    **self._listed(depth),
                    "not": self._choice.choice([{"type": "string"}, {"const": 1}, {"enum": ["a"]}]),
                }
            case 1:
                return {"type": "string", "maxLength": 6, "not": {"enum": ["a", "ab", "é"]}}
            case 2:
                return {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True}
            case 3:
                return {**schema, "dependentRequired": {names[0]: [self._choice.choice(_NAMES)]}}
        schema["properties"][names[0]] = {"enum": ["a", "b"]}
        asked = {"properties": {names[0]: {"const": "a"}}}
        return {**schema, "if": asked, "then": {"required": [self._choice.choice(_NAMES)]}}
