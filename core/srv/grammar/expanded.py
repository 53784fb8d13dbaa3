"""Keywords of JSON schemas that grammar libraries lack, written with keywords that they have, where that is exact.

    not: {type, const or enum}                     the types and values that are left
    uniqueItems of few values                      all arrays of them
    contains, minContains, maxContains             one alternative per place, in arrays of few elements
    dependentRequired, dependentSchemas, if        one alternative per case

What has no such form stays in the schema, and the backend refuses it. Must not know any library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, pairwise, permutations
from math import ceil, floor, inf, perm
from re import escape
from typing import Any

from srv.errors import EmptyGrammar
from srv.grammar.schema_keywords import referred
from srv.grammar.written import exact
from srv.json_schema import ANNOTATIONS, TYPES, below, change_below

Node = dict[str, Any]

MAX_ARRAYS = 400  # without repetition: of 5 values there are 326, and 101 of up to two of 10
MAX_LISTED = 64  # integers between two bounds
MAX_PLACES = 6  # elements of an array that has to contain some
MAX_TRIGGERS = 4  # properties on which others depend: 16 cases
MAX_SIZE = 100_000  # characters of the cases of one schema
MAX_TEXTS, MAX_TEXT = 64, 128  # texts that are excluded, and characters of one
_CONTAINS = ("contains", "minContains", "maxContains")
_MOVING = ("dependentRequired", "dependentSchemas", "if")


def expand(schema: object) -> None:
    """Rewrite a valid schema in place. Raises EmptyGrammar if it says itself that it has no value."""
    nodes = nodes_of(schema)
    moves = not any(_inward(node.get("$ref", "#")) for node in nodes)
    for node in reversed(nodes):  # what is inside comes first
        change_below(node, lambda part: False if _is_nothing(part) else part)
        for name in ("then", "else"):
            if "if" not in node:
                node.pop(name, None)
        if "not" in node:
            _expand_not(node)
        for name in ("minContains", "maxContains"):
            if "contains" not in node:
                node.pop(name, None)
        if "uniqueItems" in node:
            _expand_unique(node, schema)
        if moves and "contains" in node and "uniqueItems" not in node:
            _expand_contains(node)
        if moves and any(name in node for name in _MOVING):
            _expand_cases(node)
    if _is_nothing(schema):
        raise EmptyGrammar("its parts exclude each other")


def _is_nothing(node: object) -> bool:
    """Whether a schema has no value, as far as that is seen at once; of those inside it, this is known."""
    if not isinstance(node, dict):
        return node is False
    without = node.get("not", False)
    return (
        (without is not False and _is_any(without))
        or False in [part for part in node.get("allOf", ()) if isinstance(part, bool)]
        or any(name in node and all(part is False for part in node[name]) for name in ("anyOf", "oneOf"))
        or (node.get("type") == "object" and any(_property(node, name) is False for name in node.get("required", ())))
    )


def _property(node: Node, name: str) -> Any:
    closed = "additionalProperties" in node and "patternProperties" not in node
    return node.get("properties", {}).get(name, node["additionalProperties"] if closed else True)


def nodes_of(schema: object) -> list[Node]:
    """The schemas in a schema, the outer ones first."""
    nodes: list[Node] = []
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            nodes.append(node)
            waiting += [part for part, _ in below(node, "")]
    return nodes


def _inward(reference: str) -> bool:
    """Whether a reference goes through a place that moves if a schema becomes alternatives."""
    parts = reference.split("/")
    return reference != "#" and not (len(parts) == 3 and parts[1] in ("$defs", "definitions"))


def _keywords(node: Mapping[str, Any]) -> set[str]:
    return set(node) - ANNOTATIONS


def types_of(node: Mapping[str, Any]) -> list[str]:
    kinds = node.get("type", list(TYPES))
    return list(kinds) if isinstance(kinds, list) else [kinds]


def listed(node: Mapping[str, Any]) -> list[Any] | None:
    return [node["const"]] if "const" in node else node.get("enum")


def _values(node: object) -> list[Any] | None:
    """All values of a schema that lists them, each once; None for any other."""
    if not isinstance(node, dict) or not _keywords(node) <= {"const", "enum", "type"}:
        return None
    values = listed(node)
    if values is None:
        simple: Mapping[str, list[Any]] = {"boolean": [True, False], "null": [None]}
        types = types_of(node)
        return [value for name in types for value in simple[name]] if set(types) <= set(simple) else None
    by_key: dict[str, Any] = {}
    for value in values:
        if has_type(value, types_of(node)):
            by_key.setdefault(same_key(value), value)
    return list(by_key.values())


def same_key(value: object) -> str:
    """The same text for values that JSON Schema holds equal, such as 1 and 1.0."""

    def plain(part: Any) -> Any:
        if isinstance(part, list):
            return [plain(element) for element in part]
        if isinstance(part, dict):
            return {name: plain(member) for name, member in part.items()}
        return int(part) if isinstance(part, float) and part.is_integer() else part

    return json.dumps(plain(value), sort_keys=True)


def has_type(value: object, types: Sequence[str]) -> bool:
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int() | float():
            whole = isinstance(value, int) or value.is_integer()
            return "number" in types or ("integer" in types and whole)
        case str():
            return "string" in types
        case list():
            return "array" in types
    return "object" in types


def _expand_not(node: Node) -> None:
    excluded = node["not"]
    if excluded is False:
        del node["not"]
    if not isinstance(excluded, dict):
        return
    keywords = _keywords(excluded)
    if keywords == {"type"}:
        _exclude_types(node, types_of(excluded))
    elif keywords and keywords <= {"const", "enum", "type"} and (values := _values(excluded)) is not None:
        _exclude(node, values)


def _exclude_types(node: Node, excluded: Sequence[str]) -> None:
    values, types = listed(node), types_of(node)
    if values is not None:
        left = [value for value in values if not has_type(value, excluded)]
        _leave(node, ("not", "const", "enum"), left)
        return
    if "integer" in excluded and "number" in types and "number" not in excluded:
        return  # numbers that are no integers have no name
    gone = {*excluded, *(("integer",) if "number" in excluded or "number" in types else ())}
    remaining = [name for name in types if name not in gone]
    if remaining:
        _replace(node, ("not",), type=remaining if len(remaining) > 1 else remaining[0])
    else:
        node["not"] = True


def _exclude(node: Node, excluded: list[Any]) -> None:
    """Leave values out of a schema that lists its own, or of integers or texts."""
    keys = set(map(same_key, excluded))
    values = _values({name: value for name, value in node.items() if name != "not"})
    if values is not None:
        _leave(node, ("not", "const"), [value for value in values if same_key(value) not in keys])
    elif node.get("type") == "integer" and "enum" not in node and "const" not in node:
        _exclude_integers(node, sorted({int(value) for value in excluded if has_type(value, ("integer",))}))
    elif node.get("type") == "string" and not _keywords(node) & {"enum", "const", "pattern", "format"}:
        texts = [value for value in excluded if isinstance(value, str)]
        if len(texts) <= MAX_TEXTS and all(len(text) <= MAX_TEXT for text in texts):
            _replace(node, ("not",), **({"pattern": f"^{other_texts(texts)}$"} if texts else {}))


def _leave(node: Node, gone: Sequence[str], values: list[Any]) -> None:
    if values:
        _replace(node, gone, enum=values)
    else:
        node["not"] = True


def _exclude_integers(node: Node, excluded: list[int]) -> None:
    if len(excluded) > MAX_TEXTS or "anyOf" in node:
        return
    if not excluded:
        del node["not"]
        return
    low, high = whole_bounds(node)
    borders: list[int | None] = [None, *excluded, None]
    ranges: list[Node] = []
    for before, after in pairwise(borders):
        lows = [bound for bound in (low, None if before is None else before + 1) if bound is not None]
        highs = [bound for bound in (high, None if after is None else after - 1) if bound is not None]
        if not (lows and highs and max(lows) > min(highs)):
            bounds = ({"minimum": max(lows)} if lows else {}) | ({"maximum": min(highs)} if highs else {})
            ranges.append({"type": "integer", **bounds})
    rest = {name: node[name] for name in _keywords(node) - {"not", "type", *BOUNDS}}
    if ranges:
        _replace(node, tuple(_keywords(node)), anyOf=[{**rest, **interval} for interval in ranges])
    else:
        node["not"] = True


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def whole_bounds(node: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The smallest and the largest integer of a schema."""
    lows = [ceil(exact(node["minimum"]))] if "minimum" in node else []
    lows += [floor(exact(node["exclusiveMinimum"])) + 1] if "exclusiveMinimum" in node else []
    highs = [floor(exact(node["maximum"]))] if "maximum" in node else []
    highs += [ceil(exact(node["exclusiveMaximum"])) - 1] if "exclusiveMaximum" in node else []
    return max(lows, default=None), min(highs, default=None)


def other_texts(texts: Sequence[str]) -> str:
    """A regular expression of all texts but these."""
    firsts = sorted({text[0] for text in texts if text})
    parts = [escape(first) + other_texts([text[1:] for text in texts if text[:1] == first]) for first in firsts]
    # In a set, escapes of single characters mean the same everywhere.
    parts.append(f"[^{''.join(map(_in_set, firsts))}](.|\\n)*" if firsts else "(.|\\n)+")
    return f"({'|'.join(parts)}){'' if '' in texts else '?'}"


def _in_set(character: str) -> str:
    return f"\\{character}" if character in "\\]^-[&~" else character


def _expand_unique(node: Node, schema: object) -> None:
    most = node.get("maxItems")
    if node["uniqueItems"] is False or (most is not None and most <= 1):
        del node["uniqueItems"]
        return
    values = _finite(node.get("items"), schema)
    is_plain = _keywords(node) <= {"type", "items", "uniqueItems", "minItems", "maxItems", *_CONTAINS}
    if values is None or not is_plain or node.get("type") != "array":
        return
    sizes = range(int(node.get("minItems", 0)), min(len(values), int(len(values) if most is None else most)) + 1)
    if sum(perm(len(values), size) for size in sizes) > MAX_ARRAYS:
        return
    arrays = [list(permutation) for size in sizes for permutation in permutations(values, size)]
    if "contains" in node:
        contained = values if _is_any(node["contains"]) else _finite(node["contains"], schema)
        if contained is None:
            return
        keys, (least, most) = set(map(same_key, contained)), _counts(node)
        arrays = [array for array in arrays if least <= sum(same_key(value) in keys for value in array) <= most]
    if arrays:
        _replace(node, ("type", "items", "uniqueItems", "minItems", "maxItems", *_CONTAINS), enum=arrays)


def _finite(node: object, schema: object, depth: int = 0) -> list[Any] | None:
    """As `_values`, also of integers between bounds, of alternatives, and of a reference."""
    if not isinstance(node, dict) or depth > MAX_LISTED:
        return None
    keywords = _keywords(node)
    if keywords == {"$ref"}:
        return _finite(referred(schema, node["$ref"]), schema, depth + 1)
    if keywords == {"anyOf"}:
        several = [_finite(branch, schema, depth + 1) for branch in node["anyOf"]]
        every = [value for values in several for value in values or []]
        return None if None in several else list({same_key(value): value for value in every}.values())
    if node.get("type") == "integer" and keywords <= {"type", *BOUNDS}:
        low, high = whole_bounds(node)
        return list(range(low, high + 1)) if low is not None and high is not None and high - low < MAX_LISTED else None
    return _values(node)


def _is_any(node: object) -> bool:
    return node is True or (isinstance(node, dict) and not _keywords(node))


def _counts(node: Node) -> tuple[int, float]:
    """How many elements of an array at least and at most follow `contains`."""
    return int(node.get("minContains", 1)), node.get("maxContains", inf)


def _expand_contains(node: Node) -> None:
    """Say with `prefixItems` which elements follow `contains`."""
    items, contained, (least, most) = node.get("items", {}), node["contains"], _counts(node)
    if least == 0 and most == inf:
        _replace(node, _CONTAINS)
        return
    is_plain = _keywords(node) <= {"type", "items", "minItems", "maxItems", *_CONTAINS}
    if not is_plain or node.get("type") != "array" or not (isinstance(items, dict) or items is True):
        return
    shortest, longest = int(node.get("minItems", 0)), node.get("maxItems", inf)
    if _is_any(contained) or contained == items:  # each element does
        longest = min(longest, most)
        _replace(node, _CONTAINS, minItems=max(shortest, least), **({"maxItems": longest} if longest < inf else {}))
        return
    other = _other(items, contained) if most < inf else None
    if most == 0 and least == 0 and other is not None:
        _replace(node, _CONTAINS, items=other)
    if most == 0 or longest > MAX_PLACES or least > longest or (most < inf and other is None):
        return
    sizes = range(shortest, int(longest) + 1)
    cases = _with_some(items, _both_values(items, contained), other, sizes, (least, most))
    if cases and len(json.dumps(cases)) <= MAX_SIZE:
        alternatives = cases[0] if len(cases) == 1 else {"anyOf": cases}
        _replace(node, tuple(_keywords(node)), **alternatives)


def _other(items: object, contained: object) -> Node | None:
    """The elements that do not follow `contains`; None if no schema says so."""
    rest = {**(items if isinstance(items, dict) else {}), "not": contained}
    if isinstance(items, dict) and "not" in items:
        return None
    _expand_not(rest)
    return None if "not" in rest else rest


def _both_values(items: object, contained: Any) -> Any:
    """The elements that follow both schemas."""
    if _is_any(items) or not isinstance(items, dict):
        return contained
    contained_values, item_values = _values(contained), _values(items)
    if contained_values is not None and item_values is not None:
        keys = set(map(same_key, item_values))
        return {"enum": [value for value in contained_values if same_key(value) in keys]}
    if contained_values is not None and _keywords(items) == {"type"}:
        return {"enum": [value for value in contained_values if has_type(value, types_of(items))]}
    return {"allOf": [items, contained]}


def _with_some(items: object, some: object, other: Node | None, sizes: range, counts: tuple[int, float]) -> list[Node]:
    """The arrays in which as many elements as `counts` are like `some`, which ones, and the rest like `other`.

    Without `other`, those behind the last of the fewest are like `items`.
    """
    least, most = counts
    if isinstance(some, dict) and some.get("enum") == []:
        return []
    if other is None:
        rest = items if isinstance(items, dict) else {}
        return [
            {
                "type": "array",
                "prefixItems": [some if place in places else rest for place in range(places[-1] + 1)],
                "items": rest,
                "minItems": max(sizes.start, places[-1] + 1),
                "maxItems": sizes.stop - 1,
            }
            for places in combinations(range(sizes.stop - 1), least)
        ]
    return [
        {
            "type": "array",
            **({"prefixItems": [some if place in places else other for place in range(size)]} if size else {}),
            "minItems": size,
            "maxItems": size,
        }
        for size in sizes
        for count in range(least, int(min(most, size)) + 1)
        for places in combinations(range(size), count)
    ]


def _expand_cases(node: Node) -> None:
    """Make alternatives of an object whose properties depend on one another."""
    if node.get("type") != "object":
        return
    base = {name: node[name] for name in node if name not in ANNOTATIONS and name not in (*_MOVING, "then", "else")}
    cases, dependent = _conditional(base, node), _dependent(node)
    if cases is None or dependent is None:
        return
    cases = [case for conjunct in cases for case in _depending(conjunct, dependent)]
    if not cases or len(cases) * len(json.dumps(node)) > MAX_SIZE:
        return
    if len(cases) == 1:
        _replace(node, tuple(_keywords(node)), **cases[0])
    else:
        _replace(node, tuple(_keywords(node)), anyOf=cases)


def _dependent(node: Node) -> dict[str, list[Any]] | None:
    """What holds if a property is there, by its name; None for too many."""
    requirements: dict[str, list[Any]] = {}
    for name, names in node.get("dependentRequired", {}).items():
        requirements.setdefault(name, []).append({"required": names})
    for name, schema in node.get("dependentSchemas", {}).items():
        requirements.setdefault(name, []).append(schema)
    return requirements if len(requirements) <= MAX_TRIGGERS else None


def _depending(base: Node, dependent: Mapping[str, list[Any]]) -> list[Node]:
    cases: list[Node] = []
    for present in chain.from_iterable(combinations(dependent, size) for size in range(len(dependent) + 1)):
        case = _with_required(base, present)
        for schema in chain.from_iterable(dependent[name] for name in present):
            case = _both(case, schema)
        absent = [name for name in dependent if name not in present]
        if not any(name in _required(case) for name in absent):
            for name in absent:
                case = _without_property(case, name)
            cases.append(case)
    return cases


def _conditional(base: Node, node: Node) -> list[Node] | None:
    """The cases of `if` where it says which values one property has; None if it says something else."""
    condition, then, other = node.get("if", True), node.get("then", True), node.get("else", True)
    if isinstance(condition, bool):
        return [_both(base, then if condition else other)]
    properties = condition.get("properties", {})
    if not _keywords(condition) <= {"properties", "required", "type"} or condition.get("type", "object") != "object":
        return None
    name = next(iter(properties), None)
    required = condition.get("required", [])
    if len(properties) != 1 or not set(required) <= {name} or not isinstance(base.get("properties"), dict):
        return None
    sides = _sides(base["properties"].get(name), properties[name])
    if name is None or sides is None:
        return None
    cases = [
        _both(_with_property(base, name, side), schema)
        for side, schema in zip(sides, (then, other), strict=True)
        if side is not None
    ]
    if name not in _required(base):
        cases.append(_both(_without_property(base, name), other if required else then))
    return cases


def _sides(property_schema: object, condition: object) -> tuple[Node | None, Node | None] | None:
    """The schema of a property with the values that are asked for, and with all others; None where it has no such."""
    condition_values = _values(condition)
    if condition_values is None or not isinstance(property_schema, dict):
        return None
    keys = set(map(same_key, condition_values))
    values = _values(property_schema)
    if values is not None:
        yes = [value for value in values if same_key(value) in keys]
        no = [value for value in values if same_key(value) not in keys]
        return ({"enum": yes} if yes else None), ({"enum": no} if no else None)
    if _keywords(property_schema) != {"type"}:
        return None
    yes = [value for value in condition_values if has_type(value, types_of(property_schema))]
    rest: Node = {**property_schema, "not": {"enum": condition_values}}
    _expand_not(rest)
    return None if "not" in rest else (({"enum": yes} if yes else None), rest)


def _both(node: Node, schema: Any) -> Node:
    if schema is True or schema == {}:
        return node
    simple = isinstance(schema, dict) and _keywords(schema) <= {"required", "type"}
    if simple and schema.get("type", "object") == "object":
        return _with_required(node, schema.get("required", ()))
    return {"allOf": [*node["allOf"], schema] if set(node) == {"allOf"} else [node, schema]}


def _first(node: Node) -> Node:
    """The schema that states the properties."""
    return node["allOf"][0] if set(node) == {"allOf"} else node


def _changed(node: Node, **changes: Any) -> Node:
    if set(node) == {"allOf"}:
        return {"allOf": [{**_first(node), **changes}, *node["allOf"][1:]]}
    return {**node, **changes}


def _required(node: Node) -> list[str]:
    return list(_first(node).get("required", []))


def _with_required(node: Node, names: Sequence[str]) -> Node:
    return _changed(node, required=list(dict.fromkeys([*_required(node), *names]))) if names else node


def _with_property(node: Node, name: str, schema: Node) -> Node:
    changed = _changed(node, properties={**_first(node).get("properties", {}), name: schema})
    return _with_required(changed, (name,))


def _without_property(node: Node, name: str) -> Node:
    first = _first(node)
    properties = {key: value for key, value in first.get("properties", {}).items() if key != name}
    closed = first.get("additionalProperties", True) is False and "patternProperties" not in first
    return _changed(node, properties=properties if closed else {**properties, name: False})


def _replace(node: Node, gone: Sequence[str], **new: Any) -> None:
    for name in gone:
        node.pop(name, None)
    node.update(new)
