"""What is wrong with the JSON Schema of a tool. One that is no schema would constrain nothing.

Only what every draft of JSON Schema says is checked; which keywords a grammar enforces, its backend says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.json_schema import LISTS, MAPS, TYPES, are_types, below


class SchemaFault(NamedTuple):
    """`place`: of the faulty part in the schema, beginning with a dot. `problem`: a sentence about it."""

    place: str
    problem: str


def fault_of_schema(schema: Mapping[str, Any]) -> SchemaFault | None:
    """The first fault of the schema of a tool's arguments."""
    kind = schema.get("type", "object")
    if isinstance(kind, str) and kind in TYPES and kind != "object":
        return SchemaFault(".type", f"is {kind!r}, but arguments are an object")
    waiting: list[tuple[object, str]] = [(schema, "")]
    while waiting:
        node, place = waiting.pop()
        if isinstance(node, bool) and place:
            continue
        if not isinstance(node, Mapping):
            return SchemaFault(_dotted(place), "is no JSON Schema, which is an object, or true or false")
        if fault := _keyword_fault(node):
            return SchemaFault(_dotted(place) + fault.place, fault.problem)
        waiting += below(node, place)
    return None


def _dotted(place: str) -> str:
    """A place within a schema as part of a field's name: ".items[0]"."""
    return re.sub(r"/(\d+)(?=/|$)", r"[\1]", place).replace("/", ".")


def _keyword_fault(node: Mapping[str, Any]) -> SchemaFault | None:
    if "type" in node and not are_types(node["type"]):
        return SchemaFault(".type", f"is none of {', '.join(TYPES)}, and no array of them")
    required = node.get("required", [])
    if not isinstance(required, bool) and not (
        isinstance(required, list) and all(isinstance(name, str) for name in required)
    ):
        return SchemaFault(".required", "is no array of names")
    for key, kind, what in (*((key, dict, "object") for key in MAPS), *((key, list, "array") for key in LISTS)):
        if not isinstance(node.get(key, kind()), kind):
            return SchemaFault(f".{key}", f"is no {what} of schemas")
    if not isinstance(node.get("enum", []), list):
        return SchemaFault(".enum", "is no array of values")
    return None
