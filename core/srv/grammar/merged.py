"""JSON schemas without `allOf`, `oneOf`, and `anyOf` or `$ref` beside other keywords: the alternatives that they mean.

For schemas with numbers that a library rounds, of which `srv.grammar.exact_numbers` writes the grammar. What has no
such form is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, NoReturn

from srv.errors import GrammarError
from srv.grammar.expanded import has_type, listed, nodes_of, same_key, types_of
from srv.grammar.schema_keywords import referred
from srv.grammar.written import exact
from srv.json_schema import ANNOTATIONS

COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_ALTERNATIVES = 64
_LARGEST = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLEST = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_NAMED = ("properties", "additionalProperties")

Node = dict[str, Any]


class Alternatives:
    """The alternatives of the schemas within one. They are the same objects each time, so that rules can be named."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[int, tuple[object, list[Node] | None]] = {}  # by identity; None: being found
        self._pairs: dict[tuple[int, int], tuple[object, object, Node]] = {}

    def of(self, node: Any) -> list[Node]:
        """The schemas without `COMBINING` of which a value follows one; [] if none can. Raises GrammarError."""
        if isinstance(node, bool):
            return [{}] if node else []
        if id(node) not in self._known:
            self._known[id(node)] = node, None
            self._known[id(node)] = node, self._find(node)
        alternatives = self._known[id(node)][1]
        if alternatives is None:
            refuse("in a schema that contains itself at the same place")
        return alternatives

    def _find(self, node: Node) -> list[Node]:
        flat = {name: value for name, value in node.items() if name not in ANNOTATIONS | COMBINING}
        base = self._finished(flat)
        alternatives = [] if base is None else [base]
        if "$ref" in node:
            target = referred(self._root, node["$ref"])
            if not isinstance(target, dict | bool):
                refuse(f"beside the reference {node['$ref'][:40]!r}")
            alternatives = self._cross(alternatives, self.of(target))
        for part in node.get("allOf", ()):
            alternatives = self._cross(alternatives, self.of(part))
        if "anyOf" in node:
            alternatives = self._cross(alternatives, [one for branch in node["anyOf"] for one in self.of(branch)])
        if "oneOf" in node:
            several = [self._cross(alternatives, self.of(branch)) for branch in node["oneOf"]]
            for left, right in combinations(several, 2):
                if not all(_disjoint(one, other) for one in left for other in right):
                    refuse("in a oneOf whose alternatives may overlap")
            alternatives = [one for group in several for one in group]
        return alternatives

    def _cross(self, left: Sequence[Node], right: Sequence[Node]) -> list[Node]:
        if len(left) * len(right) > MAX_ALTERNATIVES:
            refuse(f"in more than {MAX_ALTERNATIVES} alternatives")
        merged = [self._merged(one, other) for one in left for other in right]
        return [node for node in merged if node is not None]

    def _merged(self, left: Node, right: Node) -> Node | None:
        """What follows both; None if nothing does."""
        if not left or not right:
            return left or right
        merged = {**left, **right}
        for name in left.keys() & right.keys():
            if name not in _NAMED and left[name] != right[name]:
                merged[name] = self._combined(name, left[name], right[name])
        if any(name in side for side in (left, right) for name in _NAMED):
            merged |= self._properties(left, right)
        if ("enum" in left or "const" in left) and ("enum" in right or "const" in right):
            keys = {same_key(value) for value in listed(right) or ()}
            merged.pop("const", None)
            merged["enum"] = [value for value in listed(left) or () if same_key(value) in keys]
        return self._finished(merged)

    def _combined(self, name: str, left: Any, right: Any) -> Any:
        if name in _LARGEST or name in _SMALLEST:
            return (max if name in _LARGEST else min)(left, right, key=exact)
        match name:
            case "type":
                return _common_types(left, right)
            case "required":
                return list(dict.fromkeys([*left, *right]))
            case "items":
                return self._both(left, right)
            case "const" | "enum":
                return left  # replaced by the common values
            case "multipleOf" if isinstance(left, int) and isinstance(right, int):
                low, high = sorted((left, right))
                if high % low == 0:
                    return high
        return refuse(f"in an allOf with two values of {name[:40]!r}")

    def _properties(self, left: Node, right: Node) -> Node:
        if "patternProperties" in left or "patternProperties" in right:
            refuse("in an allOf with patternProperties")
        names = dict.fromkeys([*left.get("properties", {}), *right.get("properties", {})])
        properties = {name: self._both(_property(left, name), _property(right, name)) for name in names}
        rest = self._both(left.get("additionalProperties", True), right.get("additionalProperties", True))
        return {"properties": properties} | ({} if rest is True else {"additionalProperties": rest})

    def _both(self, left: Any, right: Any) -> Any:
        if left is False or right is False:
            return False
        if left in (True, {}) or left is right:
            return right
        if right in (True, {}):
            return left
        key = id(left), id(right)
        if key not in self._pairs:
            self._pairs[key] = left, right, {"allOf": [left, right]}
        return self._pairs[key][2]

    def _finished(self, node: Node) -> Node | None:
        """A schema without types and values that its other keywords exclude; None if nothing is left."""
        if node.get("type") == []:
            return None
        values = listed(node)
        if values is None:
            return node
        if others := set(node) - {"const", "enum", "type", *BOUNDS}:
            refuse(f"with the keyword {min(others)[:40]!r} beside 'enum'")
        remaining = [value for value in values if has_type(value, types_of(node)) and _within(value, node)]
        if not remaining:
            return None
        return {"enum": remaining}


def write_exclusive(schema: object) -> None:
    """Write each `oneOf` whose alternatives exclude each other as `anyOf`, in place: not all libraries know `oneOf`."""
    nodes = nodes_of(schema)
    if any("/oneOf" in node.get("$ref", "") for node in nodes):
        return
    alternatives, keep_alive = Alternatives(schema), list[Node]()
    for node in nodes:
        if "oneOf" in node and "anyOf" not in node:
            exclusive = {"oneOf": node["oneOf"]}
            keep_alive.append(exclusive)  # it is known by its identity
            with suppress(GrammarError):  # they may overlap, or are not known to exclude each other
                alternatives.of(exclusive)
                node["anyOf"] = node.pop("oneOf")


def refuse(what: str) -> NoReturn:
    raise GrammarError(f"a number that the library would change cannot be enforced {what}")


def _property(node: Node, name: str) -> Any:
    return node.get("properties", {}).get(name, node.get("additionalProperties", True))


def _common_types(left: Any, right: Any) -> Any:
    ours, theirs = ([kinds] if isinstance(kinds, str) else kinds for kinds in (left, right))
    common = [name for name in ours if name in theirs or (name == "integer" and "number" in theirs)]
    common += [name for name in theirs if name == "integer" and "number" in ours and "integer" not in common]
    return common[0] if len(common) == 1 else common


def _within(value: object, node: Mapping[str, Any]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    number = exact(value)
    return (
        number >= exact(node.get("minimum", value))
        and number <= exact(node.get("maximum", value))
        and ("exclusiveMinimum" not in node or number > exact(node["exclusiveMinimum"]))
        and ("exclusiveMaximum" not in node or number < exact(node["exclusiveMaximum"]))
    )


def _disjoint(left: Node, right: Node) -> bool:
    """Whether no value can follow both, as far as that is seen at once."""
    values, others = listed(left), listed(right)
    if values is not None and others is not None:
        return not {same_key(value) for value in values} & {same_key(value) for value in others}
    if values is not None or others is not None:
        few, node = (values, right) if values is not None else (others, left)
        return not any(has_type(value, types_of(node)) and _within(value, node) for value in few or ())
    types = _common_types(types_of(left), types_of(right))
    if not types:
        return True
    if types in ("integer", "number") and (_apart(left, right) or _apart(right, left)):
        return True
    return types == "object" and _told_apart(left, right)


def _apart(low: Node, high: Node) -> bool:
    tops = [(exact(low[name]), name == "maximum") for name in ("maximum", "exclusiveMaximum") if name in low]
    floors = [(exact(high[name]), name == "minimum") for name in ("minimum", "exclusiveMinimum") if name in high]
    return any(
        top < floor or (top == floor and not (with_top and with_floor))
        for top, with_top in tops
        for floor, with_floor in floors
    )


def _told_apart(left: Node, right: Node) -> bool:
    """Whether a property that both require has different values, or one requires what the other forbids."""
    for name in {*left.get("required", ()), *right.get("required", ())}:
        sides = [_property(node, name) for node in (left, right)]
        if False in sides:
            return True
        both = name in left.get("required", ()) and name in right.get("required", ())
        lists = [listed(side) if isinstance(side, dict) else None for side in sides]
        if both and None not in lists:
            keys = [{same_key(value) for value in values or ()} for values in lists]
            if not keys[0] & keys[1]:
                return True
    return False
