"""Values written as tags that are named after their members, in formats whose text has no JSON:

    <city>Paris</city><near><item>x</item></near>  ─►  {"city": "Paris", "near": ["x"]}

The schema of the tool says what is an array and which type a text has. A value that is not of this form stays text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.reply.json_text import MAX_DEPTH, json_of
from srv.reply.typed_values import as_json, part_of, types_of

ITEM = "item"
_EMPTY = {"array": "[]", "object": "{}"}
_Key = tuple[str, str]  # what stands around the name in an opening tag: `TaggedBody.key`


def nested_json(key: _Key, text: str, name: str, schema: Mapping[str, Any]) -> str:
    """The JSON text of the value of an argument. `schema`: of the tool."""
    return _json(key, text, part_of(schema, name, schema), schema, 0)


def _json(key: _Key, text: str, schema: Any, root: Mapping[str, Any], depth: int) -> str:
    types = types_of(schema, root) if schema is not None else {"string"}
    children = _children(key, text) if depth < MAX_DEPTH else None
    if not children:
        empty = [_EMPTY[kind] for kind in _EMPTY if kind in types and "string" not in types and not text.strip()]
        return empty[0] if empty else as_json(text, types)
    parts = [(name, _json(key, inner, part_of(schema, name, root), root, depth + 1)) for name, inner in children]
    if "array" in types or ("object" not in types and all(name == ITEM for name, _ in parts)):
        return f"[{', '.join(value for _, value in parts)}]"
    return "{" + ", ".join(f"{json_of(name)}: {value}" for name, value in parts) + "}"


def _children(key: _Key, text: str) -> list[tuple[str, str]] | None:
    """The names and the texts of the tags that a text consists of; None if there is anything else."""
    begin, end = key
    children: list[tuple[str, str]] = []
    while text := text.strip():
        name, closes, rest = text.removeprefix(begin).partition(end)
        if not text.startswith(begin) or not closes or name.startswith("/"):
            return None
        opening, closing = f"{begin}{name}{end}", f"{begin}/{name}{end}"
        inner, depth = "", 1
        while depth:
            before, closes, rest = rest.partition(closing)
            if not closes:
                return None
            depth += before.count(opening) - 1
            inner += before + (closing if depth else "")
        children.append((name, inner))
        text = rest
    return children
