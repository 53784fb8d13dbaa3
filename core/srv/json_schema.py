"""The form of JSON Schema: the names of types, and which keywords have schemas as their values. Torch-free.

What a grammar enforces (`srv.grammar`), and what is refused of a tool (`srv.reply`), is said there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose values have schemas by name
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
# Keywords that say nothing about which values are valid.
ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description", "default"),
        *("examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType"),
        *("discriminator", "example", "externalDocs", "xml"),  # of OpenAPI
    }
)
_ONE = ("not", "items", "additionalProperties", "propertyNames", "contains", "if", "then", "else")
_BOOLEAN_PLACES = ("items", "additionalProperties")


def are_types(value: object) -> bool:
    """Whether this may be the value of `type`: a name, or an array of them that is not empty."""
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def below(node: Mapping[str, Any], place: str) -> Iterator[tuple[object, str]]:
    """The schemas directly inside a schema, which may be none, with their places ("/items/0")."""
    for name in _ONE:
        skipped = isinstance(node.get(name), list) or (name in _BOOLEAN_PLACES and isinstance(node.get(name), bool))
        if name in node and not skipped:
            yield node[name], f"{place}/{name}"
    for name in (*LISTS, "items"):
        if isinstance(node.get(name), list):
            yield from ((subschema, f"{place}/{name}/{index}") for index, subschema in enumerate(node[name]))
    for name in (*MAPS, "dependentSchemas"):
        if isinstance(node.get(name), Mapping):
            yield from ((subschema, f"{place}/{name}/{key[:40]}") for key, subschema in node[name].items())


def change_below(node: dict[str, Any], change: Callable[[Any], Any]) -> None:
    """Put `change(schema)` in the place of each schema directly inside a schema, as `below` has them."""
    for name, value in node.items():
        if name in (*LISTS, "items") and isinstance(value, list):
            node[name] = list(map(change, value))
        elif name in (*MAPS, "dependentSchemas") and isinstance(value, Mapping):
            node[name] = {key: change(subschema) for key, subschema in value.items()}
        elif name in _ONE:
            node[name] = change(value)
