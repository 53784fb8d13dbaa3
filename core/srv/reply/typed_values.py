"""Gives text the type that a JSON Schema asks for: arguments in formats without types.

    "5" ─► 5 if the schema allows an integer, "5" if it allows only strings

Must not know any format. A value that has none of the types stays text: what a model wrote is not lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from srv.reply.json_text import json_of
from srv.reply.python_values import NOT_READABLE, expression, literal

_MAX_DEPTH = 20
_COMBINED = ("anyOf", "oneOf", "allOf")
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say. `root`: where `$ref` points into."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {kind_name for kind_name in kind if isinstance(kind_name, str)}
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_resolve(reference, root), root, depth + 1)
    kinds: set[str] = set()
    for key in _COMBINED:
        members = schema.get(key)
        for member in members if isinstance(members, list) else ():
            kinds |= types_of(member, root, depth + 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    return kinds | {"null" if value is None else _NAMES.get(type(value), "string") for value in values}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a schema refers to, through any number of references; itself if it refers to none."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = root if reference == "#" else _resolve(reference, root)
    return schema


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    target: Any = root if reference.startswith("#/") else None
    for part in reference[2:].split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def property_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """The types of a parameter of a tool. One that the tool does not declare is a string."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return {"string"}
    return types_of(properties[name], schema)


def part_of(schema: Any, name: str, root: Mapping[str, Any], depth: int = 0) -> Any:
    """The schema of a member of an object, or of the elements of an array; None if the schema does not say. What
    several alternatives say of it is an `anyOf`."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return part_of(_resolve(reference, root), name, root, depth + 1)
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    inner = schema.get("items") if "array" in types_of(schema, root) else schema.get("additionalProperties")
    if inner is not None:
        return inner
    members = [member for key in _COMBINED if isinstance(schema.get(key), list) for member in schema[key]]
    parts = [part for member in members if (part := part_of(member, name, root, depth + 1)) is not None]
    return {"anyOf": parts} if len(parts) > 1 else parts[0] if parts else None


def as_json(text: str, types: set[str]) -> str:
    """The JSON text of a value. `types`: those allowed; empty: any."""
    stripped = text.strip()
    if types == {"string"}:
        return json_of(text)
    for value in _candidates(stripped):
        if not types or _matches(value, types):
            shown = stripped if _is_json(stripped) and not isinstance(value, str) else None
            return shown or json_of(value)
    return json_of(text)


def _matches(value: Any, types: set[str]) -> bool:
    if value is None:
        return "null" in types
    kind = _NAMES[type(value)]
    if kind == "string":
        return False  # text is taken as it is, with its quotes
    return kind in types or (kind == "integer" and "number" in types)


def _candidates(text: str) -> Iterator[Any]:
    """The values that a text may stand for, without the text itself."""
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    if text in ("null", "None"):
        yield None
    for read in (_from_json, _from_python):
        try:
            value = read(text)
            if type(value) in (int, float, list, dict, str):
                json.dumps(value, allow_nan=False)
                yield value
        except NOT_READABLE:
            continue


def _from_json(text: str) -> Any:
    return json.loads(text)


def _from_python(text: str) -> Any:
    return literal(expression(text)) if text.startswith(("[", "{")) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
        return True
    except (ValueError, RecursionError):
        return False
