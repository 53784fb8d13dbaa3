"""Which JSON schemas a grammar library enforces: such libraries pass over keywords that they do not know.

A schema with a keyword that would be passed over is refused with its name and place, because an output would be said to
follow a schema that nothing enforced. Must not know any library: each backend states its `EnforcedKeywords`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

from srv.errors import GrammarError, NotEnforceable
from srv.grammar.written import dump
from srv.json_schema import ANNOTATIONS, LISTS, MAPS, are_types, below

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


# Formats that describe a value, as OpenAPI, pydantic and JSON Schema name them: they are enforced where a library does
# and say nothing where it does not. Any other format that a library does not know is refused: it may be misspelt.
ANNOTATION_FORMATS = frozenset(
    {
        *("password", "binary", "byte", "base64", "base64url", "json-string", "color", "phone", "regex", "decimal"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double"),
        *("path", "file-path", "directory-path", "multi-host-uri", "uri-reference", "uri-template", "iri"),
        *("iri-reference", "idn-email", "idn-hostname", "json-pointer", "relative-json-pointer", "name-email"),
        *("uuid1", "uuid3", "uuid4", "uuid5", "uuid6", "uuid7", "uuid8", "time-delta", "date-time-local"),
        *("ipvanyaddress", "ipvanyinterface", "ipvanynetwork", "ipv4network", "ipv6network"),
        *("ipv4interface", "ipv6interface"),
    }
)
EXACT = 2**53  # integers up to it are exact in 64-bit floating point
_LENGTHS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
# What the values of keywords are, by what is said of them.
_SHAPES: Mapping[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "the name of a type": (("type",), are_types),
    "a schema": (
        ("not", "additionalProperties", "propertyNames", "contains", "if", "then", "else"),
        lambda value: isinstance(value, dict | bool),
    ),
    "a schema or an array of them": (("items",), lambda value: isinstance(value, dict | bool | list)),
    "an array of schemas that is not empty": (
        LISTS,
        lambda value: isinstance(value, list) and bool(value),
    ),
    "an object of schemas": (
        (*MAPS, "dependentSchemas"),
        lambda value: isinstance(value, dict),
    ),
    "an array of texts": (("required",), lambda value: isinstance(value, list) and all(map(_is_text, value))),
    "an array that is not empty": (("enum",), lambda value: isinstance(value, list) and bool(value)),
    "a text": (("pattern", "format", "$ref", "$schema", "$id"), lambda value: _is_text(value)),
    "a regular expression, which a single backslash does not end": (("pattern",), lambda value: _is_whole(value)),
    "an object of regular expressions, which a single backslash does not end": (
        ("patternProperties",),
        lambda value: all(map(_is_whole, value)),
    ),
    "a boolean": (("uniqueItems",), lambda value: isinstance(value, bool)),
    "an object of arrays of texts": (
        ("dependentRequired",),
        lambda value: (
            isinstance(value, dict)
            and all(isinstance(names, list) for names in value.values())
            and all(_is_text(name) for names in value.values() for name in names)
        ),
    ),
    "a number": (("minimum", "maximum"), lambda value: _is_number(value)),
    "a number or a boolean": (
        ("exclusiveMinimum", "exclusiveMaximum"),
        lambda value: isinstance(value, int | float),
    ),
    "a number above 0": (("multipleOf",), lambda value: _is_number(value) and value > 0),
    "a whole number that is not negative": (
        _LENGTHS,
        lambda value: _is_number(value) and value >= 0 and value == int(value),
    ),
}


def check_shapes(schema: object) -> None:
    """Raises GrammarError with the first keyword whose value is none that JSON Schema allows: it would say nothing."""
    waiting: list[tuple[object, str]] = [(schema, "")]
    while waiting:
        node, place = waiting.pop()
        if not isinstance(node, Mapping):
            if not isinstance(node, bool):
                raise GrammarError(
                    f"a schema is an object or a boolean, not {str(node)[:40]!r} at {place or 'its root'}"
                )
            continue
        for shape, (keywords, is_right) in _SHAPES.items():
            for name in keywords:
                if name in node and not is_right(node[name]):
                    where = f" at {place}" if place else ""
                    raise GrammarError(f"{name!r} is {shape}, not {str(node[name])[:40]!r}{where}")
        waiting += below(node, place)


def check_counts(schema: object) -> None:
    """Raises NotEnforceable for a `minProperties` that names which come twice would meet: no grammar counts names."""
    waiting: list[tuple[object, str]] = [(schema, "")]
    while waiting:
        node, place = waiting.pop()
        if isinstance(node, Mapping):
            closed = node.get("additionalProperties", True) is False and "patternProperties" not in node
            if not closed and node.get("minProperties", 0) > len(set(node.get("required", ()))) + 1:
                which = "names that the schema does not list" + (f" at {place}" if place else "")
                raise NotEnforceable(f"'minProperties' cannot be enforced for {which}")
            waiting += below(node, place)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(pattern: str) -> bool:
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 0


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or isfinite(value)  # integers of any size are numbers


def drop_annotation_formats(schema: object, enforced: frozenset[str]) -> None:
    """Take the formats out of a schema that describe only, without those that a library enforces."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            name = node.get("format")
            if name in ANNOTATION_FORMATS and name not in enforced:
                del node["format"]
            waiting += [part for part, _ in below(node, "")]


def has_large(value: object) -> bool:
    """Whether a JSON value contains an integer that is rounded."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, float) and not isfinite(part):
            raise GrammarError("it has a number that is too large for its point")
        if isinstance(part, int | float) and abs(part) > EXACT:
            return True
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return False


class EnforcedKeywords(NamedTuple):
    """What a library enforces.

    `keywords`: beside annotations. `formats`: of strings. `alone`: keywords that it enforces only if no keyword beside
    annotations stands next to them. `exclusive`: pairs of which it enforces one alone. `booleans`: whether a schema may
    be true or false anywhere; else only where `items` and `additionalProperties` are. `float_text`: how it writes a
    number with decimals.
    """

    keywords: frozenset[str]
    formats: frozenset[str]
    alone: frozenset[str] = frozenset()
    exclusive: tuple[tuple[str, str], ...] = ()
    booleans: bool = True
    float_text: Callable[[float], str] = repr


def check_enforced(schema: object, enforced: EnforcedKeywords, library: str) -> None:
    """Raises GrammarError with the first part of a schema that a library would pass over."""
    waiting: list[tuple[object, str]] = [(schema, "")]
    checked: set[int] = set()
    references: list[tuple[str, str]] = []
    while waiting:
        node, place = waiting.pop()
        if reason := _unenforced(node, enforced):
            _refuse(reason, place, library)
        if isinstance(node, Mapping):
            if "$id" in node and place:
                _refuse("'$id' below the root", place, library)
            checked.add(id(node))
            references += [(node["$ref"], place)] if "$ref" in node else []
            waiting += below(node, place)
    for reference, place in references:
        if id(referred(schema, reference)) not in checked:
            _refuse(f"the reference {reference[:40]!r}", place, library)


def _refuse(reason: str, place: str, library: str) -> NoReturn:
    where = f" at {place}" if place else ""
    raise GrammarError(f"{library} does not enforce {reason}{where}; use the backend llguidance, or another schema")


def referred(schema: object, reference: str) -> object:
    """What a reference within a schema, such as #/$defs/a, stands for; None if it is of another form."""
    if reference == "#":
        return schema
    target = schema if reference.startswith("#/") else None
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            target = target.get(key) if isinstance(target, Mapping) else None
    return target


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
    if reason := _untyped(node, keywords) or _unwritten(node, enforced.float_text):
        return reason
    both = [pair for pair in enforced.exclusive if pair[0] in node and pair[1] in node]
    if both:
        return f"{both[0][0]!r} together with {both[0][1]!r}"
    if "format" in node and node["format"] not in enforced.formats | ANNOTATION_FORMATS:
        return f"the format {str(node['format'])[:40]!r}"
    properties = node.get("properties")
    listed_properties = properties if isinstance(properties, Mapping) else {}
    required = node.get("required")
    unlisted = [name for name in required if name not in listed_properties] if isinstance(required, list) else []
    return f"that the property {str(unlisted[0])[:40]!r} is required, which `properties` lacks" if unlisted else None


def _unwritten(node: Mapping[str, Any], float_text: Callable[[float], str]) -> str | None:
    """A constant that the library writes with another text."""
    waiting = [node[name] for name in ("enum", "const") if name in node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, float) and dump(part) != float_text(part):
            return f"the text of the number {dump(part)}"
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return None


def _untyped(node: Mapping[str, Any], keywords: Sequence[str]) -> str | None:
    """What is passed over because of the types of values that a schema states, or does not state."""
    kind = node.get("type")
    types = (kind,) if isinstance(kind, str) else tuple(kind) if isinstance(kind, list) else ()
    for name in keywords:
        if name in _TYPES and not set(types) & set(_TYPES[name]):
            return f"the keyword {name!r} without the type {' or '.join(_TYPES[name])}"
    for name in ("enum", "const"):
        if name not in node:
            continue
        if has_large(node[name]):
            return f"numbers beyond {EXACT} in {name!r}"
        if others := [keyword for keyword in keywords if keyword not in (name, "type")]:
            return f"{name!r} beside {others[0]!r}"
        values = node[name] if name == "enum" and isinstance(node[name], list) else [node[name]]
        if types and not all(_is_of(value, types) for value in values):
            return f"that values of {name!r} have the stated type"
    return None


def _is_of(value: object, types: Sequence[object]) -> bool:
    python_types = [python for kind in types if isinstance(kind, str) for python in _PYTHON_TYPES.get(kind, ())]
    return isinstance(value, tuple(python_types)) and (not isinstance(value, bool) or bool in python_types)
