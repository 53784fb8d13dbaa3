"""Bounds of numbers in JSON schemas: those of draft 4, and those that llguidance does not enforce exactly.

The library reads decimals as 64-bit floating point, the last digit of which may be another one. Where both bounds of a
number share their integer part, it lets the integer through that one of them excludes: 0 for {"exclusiveMinimum": 0,
"maximum": 0.5}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from srv.grammar.expanded import types_of
from srv.grammar.merged import BOUNDS, COMBINING
from srv.grammar.schema_keywords import referred
from srv.grammar.written import exact
from srv.json_schema import ANNOTATIONS, below

EXACT_DIGITS = 15  # of a decimal, that the library's reader keeps
_SIDES = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))

Node = Mapping[str, Any]


def write_bounds(schema: object) -> None:
    """Write bounds that are exclusive by a boolean, as in draft 4, as numbers, in place."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            for inclusive, exclusive in _SIDES:
                if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and inclusive in node:
                    node[exclusive] = node.pop(inclusive)
            waiting += [part for part, _ in below(node, "")]


def inexact_bounds(schema: object, nodes: Iterable[Node]) -> set[int]:
    """Of these schemas within `schema`, the identities of those whose bounds llguidance does not enforce exactly."""
    return {id(node) for node in nodes if _rounded(node) or _pinched(_conjoined(schema, [node]), schema)}


def _rounded(node: Node) -> bool:
    """Whether a bound or a constant has more digits than the library reads exactly."""
    waiting = [node[name] for name in (*BOUNDS, "multipleOf", "const", "enum") if name in node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, float) and len("".join(map(str, exact(part).as_tuple().digits)).strip("0")) > EXACT_DIGITS:
            return True
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return False


def _conjoined(schema: object, nodes: Sequence[Any]) -> list[Node]:
    """The schemas that a value may have to follow at once with these; alternatives count as if all had to hold."""
    conjuncts: dict[int, Node] = {}
    waiting = [node for node in nodes if isinstance(node, Mapping)]
    while waiting:
        node = waiting.pop()
        if id(node) in conjuncts:
            continue
        conjuncts[id(node)] = node
        alone = len(nodes) == 1 and len(conjuncts) == 1 and set(node) - ANNOTATIONS in ({"$ref"}, {"anyOf"}, {"oneOf"})
        parts = [] if alone else [part for name in COMBINING - {"$ref"} for part in node.get(name, ())]
        parts += [referred(schema, node["$ref"])] if "$ref" in node and not alone else []
        waiting += [part for part in parts if isinstance(part, Mapping)]
    return list(conjuncts.values())


def _pinched(nodes: Sequence[Node], schema: object, depth: int = 8) -> bool:
    """Whether a number that follows all these schemas is between bounds that share their integer part, of which one is
    whole and excluded. `depth`: of the properties and elements that are looked into if there are several schemas."""
    if all("number" in types_of(node) for node in nodes) and _share_integer_part(nodes):
        return True
    if len(nodes) < 2 or not depth:
        return False
    names = {name for node in nodes for name in node.get("properties", ())}
    additional = [node.get("additionalProperties") for node in nodes]
    groups = [additional, [node.get("items") for node in nodes]]
    groups += [
        [node.get("properties", {}).get(name, rest) for node, rest in zip(nodes, additional, strict=True)]
        for name in names
    ]
    groups = [[part for part in group if isinstance(part, Mapping)] for group in groups]
    return any(_pinched(_conjoined(schema, group), schema, depth - 1) for group in groups if len(group) > 1)


def _share_integer_part(nodes: Sequence[Node]) -> bool:
    lows, highs = ([(exact(node[name]), name) for node in nodes for name in names if name in node] for names in _SIDES)
    return any(
        int(low) == int(high)
        and low < high
        and ((left == "exclusiveMinimum" and low == int(low)) or (right == "exclusiveMaximum" and high == int(high)))
        for low, left in lows
        for high, right in highs
    )
