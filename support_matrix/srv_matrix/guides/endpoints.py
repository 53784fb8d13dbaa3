"""The API reference, from the server's own OpenAPI document, with examples from a file whose commands a test runs.

A new endpoint appears by itself. This module must not import the server: `srv_matrix.inventory` makes the document.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from srv_matrix.inventory import openapi
from srv_matrix.marks import escape, text_of


def read_examples(path: Path) -> dict[str, str]:
    """Shell commands by "METHOD /path"."""
    return {name: str(text).strip() for name, text in tomllib.loads(path.read_text(encoding="utf-8")).items()}


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("METHOD /path", operation) in the document's order, without the document itself."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path != "/openapi.json":
                yield f"{method.upper()} {path}", operation


def endpoints(examples: Path) -> str:
    """One section per endpoint: summary, example, fields of the body."""
    document, commands = openapi(), read_examples(examples)
    lines: list[str] = []
    for name, operation in operations(document):
        lines += [f"## {name}", "", operation["summary"], ""]
        if name in commands:
            lines += ["```bash", commands[name], "```", ""]
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is not None:
            lines += _fields(_resolved(content["schema"], document), document)
    return text_of(lines)


def _fields(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    rows = [(name, field) for name, field in schema.get("properties", {}).items() if not _untyped(field)]
    if not rows:
        return
    yield "| Field | Type | Default | Meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in rows:
        default = (
            "required"
            if name in required
            else f"`{json.dumps(field['default'])}`"
            if field.get("default") is not None
            else ""
        )
        cells = (_type(field, document), default, field.get("description", ""))
        yield f"| `{name}` | " + " | ".join(map(escape, cells)) + " |"
    yield ""
    if refused := [f"`{name}`" for name, field in schema.get("properties", {}).items() if _untyped(field)]:
        yield f"Known, but refused if they ask for anything: {', '.join(refused)}."
        yield ""


def _untyped(field: Mapping[str, Any]) -> bool:
    """Whether a field has no type: those that are declared only to be refused by name."""
    return not {"type", "anyOf", "$ref", "oneOf", "allOf", "enum", "const"}.intersection(field)


def _type(field: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return _type({"type": "object", **_resolved(field, document)}, document)
    if choices := field.get("enum") or ([field["const"]] if "const" in field else []):
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    if parts := field.get("anyOf") or field.get("oneOf") or field.get("allOf"):
        return " or ".join(dict.fromkeys(_type(part, document) for part in parts if part.get("type") != "null"))
    kind = field.get("type", "any")
    if kind == "array" and isinstance(field.get("items"), Mapping):
        return f"array of {_type(field['items'], document)}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        target: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        schema = target
    return schema
