"""Which JSON schemas a grammar library enforces: such libraries pass over keywords that they do not know.

A schema with a keyword that would be passed over is refused with its name and place, because an output would be said to
follow a schema that nothing enforced. Must not know any library: each backend states its `EnforcedKeywords`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from srv.errors import GrammarError

# Keywords that say nothing about which values are valid.
ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description", "default"),
        *("examples", "deprecated", "readOnly", "writeOnly"),
    }
)
# The types of values that a keyword says something about; libraries pass over it where `type` is missing.
_TYPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("pattern", "format", "minLength", "maxLength"), ("string",)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), ("integer", "number")),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties"), ("object",)),
    **dict.fromkeys(("propertyNames", "minProperties", "maxProperties"), ("object",)),
}
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    **{"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),)},
    **{"array": (list,), "object": (dict,)},
}
_ONE = ("not", "items", "additionalProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_BOOLEAN_PLACES = ("items", "additionalProperties")


class EnforcedKeywords(NamedTuple):
    """What a library enforces.

    `keywords`: beside annotations. `formats`: of strings. `alone`: keywords that it enforces only if no keyword beside
    annotations stands next to them. `exclusive`: pairs of which it enforces one alone. `booleans`: whether a schema may
    be true or false anywhere; else only where `items` and `additionalProperties` are.
    """

    keywords: frozenset[str]
    formats: frozenset[str]
    alone: frozenset[str] = frozenset()
    exclusive: tuple[tuple[str, str], ...] = ()
    booleans: bool = True


def check_enforced(schema: object, enforced: EnforcedKeywords, library: str) -> None:
    """Raises GrammarError with the first part of a schema that a library would pass over."""
    waiting: list[tuple[object, str]] = [(schema, "")]
    while waiting:
        node, place = waiting.pop()
        reason = _unenforced(node, enforced)
        if reason is not None:
            where = f" at {place}" if place else ""
            raise GrammarError(
                f"{library} does not enforce {reason}{where}; use the backend llguidance, or another schema"
            )
        if isinstance(node, Mapping):
            waiting += _below(node, place, enforced)


def _unenforced(node: object, enforced: EnforcedKeywords) -> str | None:
    if isinstance(node, bool):
        return None if enforced.booleans else "a schema that is true or false"
    if not isinstance(node, Mapping):
        raise GrammarError(f"a schema is {str(node)[:40]!r}, not an object")
    keywords = [name for name in node if name not in ANNOTATIONS]
    unknown = [name for name in keywords if name not in enforced.keywords]
    if unknown:
        return f"the keyword {unknown[0][:40]!r}"
    alone = [name for name in keywords if name in enforced.alone]
    if alone and len(keywords) > 1:
        return f"{alone[0]!r} beside other keywords"
    if reason := _untyped(node, keywords):
        return reason
    both = [pair for pair in enforced.exclusive if pair[0] in node and pair[1] in node]
    if both:
        return f"{both[0][0]!r} together with {both[0][1]!r}"
    if "format" in node and node["format"] not in enforced.formats:
        return f"the format {str(node['format'])[:40]!r}"
    properties = node.get("properties")
    listed = properties if isinstance(properties, Mapping) else {}
    required = node.get("required")
    unlisted = [name for name in required if name not in listed] if isinstance(required, list) else []
    return f"that the property {str(unlisted[0])[:40]!r} is required, which `properties` lacks" if unlisted else None


def _untyped(node: Mapping[str, Any], keywords: Sequence[str]) -> str | None:
    """What is passed over because of the types of values that a schema states, or does not state."""
    stated = node.get("type")
    types = (stated,) if isinstance(stated, str) else tuple(stated) if isinstance(stated, list) else ()
    for name in keywords:
        if name in _TYPES and not set(types) & set(_TYPES[name]):
            return f"the keyword {name!r} without the type {' or '.join(_TYPES[name])}"
    for name in ("enum", "const"):
        if name not in node:
            continue
        if others := [each for each in keywords if each not in (name, "type")]:
            return f"{name!r} beside {others[0]!r}"
        values = node[name] if name == "enum" and isinstance(node[name], list) else [node[name]]
        if types and not all(_is_of(value, types) for value in values):
            return f"that values of {name!r} have the stated type"
    return None


def _is_of(value: object, types: Sequence[object]) -> bool:
    known = [python for each in types if isinstance(each, str) for python in _PYTHON_TYPES.get(each, ())]
    return isinstance(value, tuple(known)) and (not isinstance(value, bool) or bool in known)


def _below(node: Mapping[str, Any], place: str, enforced: EnforcedKeywords) -> Iterator[tuple[object, str]]:
    """The schemas directly inside a schema, with their places."""
    for name in _ONE:
        if name in node and not (name in _BOOLEAN_PLACES and isinstance(node[name], bool)):
            yield node[name], f"{place}/{name}"
    for name in _LISTS:
        if isinstance(node.get(name), list):
            yield from ((each, f"{place}/{name}/{index}") for index, each in enumerate(node[name]))
    for name in _MAPS:
        if isinstance(node.get(name), Mapping):
            yield from ((each, f"{place}/{name}/{key[:40]}") for key, each in node[name].items())
