"""JSON schemas with numbers that a library changes, as Lark grammars with regular expressions in their places.

llguidance reads numbers as 64-bit floating point, so that integers beyond 2^53 become others, and a constant 1e5
becomes 100000; some bounds it does not enforce at all (`srv.grammar.bounds`). The path from the root of a schema to
such a number is written here, with `srv.grammar.integer_ranges` and `srv.grammar.decimal_ranges`; all other parts stay
JSON schemas of the library. On that path, keywords that are not written here are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from srv.errors import EmptyGrammar, GrammarError
from srv.grammar.bounds import inexact_bounds
from srv.grammar.decimal_ranges import ANY_FRACTION, at_least, at_most, decimal_multiples_pattern
from srv.grammar.expanded import nodes_of, types_of, whole_bounds
from srv.grammar.integer_ranges import integer_pattern, multiples_pattern
from srv.grammar.lark import lark_pattern, lark_text
from srv.grammar.merged import BOUNDS, COMBINING, Alternatives, refuse
from srv.grammar.schema_keywords import has_large, referred
from srv.grammar.written import dump, exact, has_written
from srv.json_schema import ANNOTATIONS, TYPES, below

_DEFINITIONS = ("$defs", "definitions")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "integer": (*BOUNDS, "multipleOf"),
    "number": (*BOUNDS, "multipleOf"),
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
}


def exact_grammar(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """The Lark grammar of a schema with numbers that the library would change; None for any other.

    options: of the library's JSON schemas. Raises GrammarError if it cannot be exact. Where only the text of a number
    cannot be kept, the library writes a number that is equal.
    """
    needed = has_large(schema) or bool(inexact_bounds(schema, nodes_of(schema)))
    if not needed and not has_written(schema):
        return None
    try:
        return ExactWriter(schema, options).grammar()
    except GrammarError:
        if needed:
            raise
        return None


class ExactWriter:
    """Writes the grammar of one schema. `options`: of the library's JSON schemas."""

    def __init__(self, schema: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._schema, self._options = schema, options
        self._definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        self._names: dict[int, tuple[str, Any]] = {}  # of the rules, with their schemas, by the identity of these
        self._alternatives = Alternatives(schema)
        self._seen: dict[int, object] = {}  # schemas by their identity
        self._large: set[int] = set()  # identities of the schemas from which such a number can be reached
        self._rules: list[str] = []
        self._objects = self._numbers = 0

    def grammar(self) -> str:
        """The Lark grammar. Raises GrammarError."""
        start = self._rule(self._schema)
        spacing = self._options.get("whitespace_pattern")
        # A grammar within a grammar does not begin with what the outer one ignores, so that spaces are written out.
        space = [f"space: SPACE?\nSPACE: {lark_pattern(spacing)} & /(.|\\n)+/"] if spacing else ['space: ""']
        return "\n".join([f"start: {start}", *self._rules, *space, ""])

    def _rule(self, node: Any) -> str:
        """The name of the rule of a schema."""
        if id(node) not in self._names:
            name = f"value_{len(self._names)}"
            self._names[id(node)] = name, node
            self._rules.append(f"{name}: {self._body(node)}")
        return self._names[id(node)][0]

    def _body(self, node: Any) -> str:
        if not self._is_large(node):
            schema = node if isinstance(node, dict) else {} if node else {"not": {}}
            return f"%json {json.dumps({**self._definitions, **schema, 'x-guidance': self._options})}"
        keywords = [name for name in node if name not in ANNOTATIONS]
        if keywords in (["$ref"], ["anyOf"]):
            several = node["anyOf"] if "anyOf" in node else [self._referred(node)]
            return " | ".join(self._rule(branch) for branch in several if branch is not False)
        if "const" in node or "enum" in node or COMBINING & set(keywords):
            return self._combined(node)
        _only(keywords, ("type", *(field for fields in _FIELDS.values() for field in fields)), "a number")
        kinds = types_of(node) if "type" in node else [name for name in TYPES if name != "integer"]
        return " | ".join(self._typed(node, kind) for kind in kinds)

    def _combined(self, node: Mapping[str, Any]) -> str:
        """The values of a schema that lists them, or the alternatives of one that combines others."""
        alternatives = self._alternatives.of(node)
        if not alternatives:
            raise EmptyGrammar("its parts exclude each other")
        if COMBINING.isdisjoint(node):
            return " | ".join(lark_text(dump(value)) for value in alternatives[0]["enum"])
        return " | ".join(map(self._rule, alternatives))

    def _typed(self, node: Mapping[str, Any], kind: str) -> str:
        if not any(name in node for name in _FIELDS.get(kind, ())):
            return self._rule({"type": kind})
        match kind:
            case "object":
                return self._object(node)
            case "array":
                return self._array(node)
        self._numbers += 1
        name = f"NUMBER_{self._numbers}"
        patterns = _number_patterns(node, kind)
        self._rules.append(f"{name}: {' & '.join(map(lark_pattern, patterns))}")
        return name

    def _array(self, node: Mapping[str, Any]) -> str:
        item, least, most = self._rule(node.get("items", True)), int(node.get("minItems", 0)), node.get("maxItems")
        if most is not None and most < least:
            raise EmptyGrammar("minItems is above maxItems")
        if most == 0:
            return '"[" space "]"'
        further = f' ("," space {item} space){{{max(least - 1, 0)},{"" if most is None else int(most) - 1}}}'
        items = f"{item} space{'' if most == 1 else further}"
        return f'"[" space {items} "]"' if least else f'"[" space ({items})? "]"'

    def _object(self, node: Mapping[str, Any]) -> str:
        """Properties come in the order of the schema, those that it does not list after them."""
        properties: Mapping[str, Any] = node.get("properties", {})
        required, additional = node.get("required", ()), node.get("additionalProperties", True)
        names = list(dict.fromkeys([*properties, *required]))
        self._objects += 1
        name = f"object_{self._objects}"
        possible = [key for key in names if self._is_possible(properties.get(key, additional))]
        if missing := [key for key in required if key not in possible]:
            raise EmptyGrammar(f"the property {missing[0][:40]!r} is required, and has no value")
        places = [
            (f"{lark_text(dump(key))} {self._after_name(properties.get(key, additional))}", key in required)
            for key in possible
        ]
        rest = first = '""'
        if additional is not False:
            self._rules.append(f"{name}_more: {name.upper()}_NAME {self._after_name(additional)}")
            self._rules.append(f"{name.upper()}_NAME: {_other_names(names)}")
            rest = f'("," space {name}_more)*'
            first = f"({name}_more {rest})?"
        self._rules += [f"{name}_rest_{len(places)}: {rest}", f"{name}_first_{len(places)}: {first}"]
        for index, (place, needed) in reversed(list(enumerate(places))):
            for state, comma in (("rest", '"," space '), ("first", "")):
                skipped = "" if needed else f" | {name}_{state}_{index + 1}"
                self._rules.append(f"{name}_{state}_{index}: {comma}{place} {name}_rest_{index + 1}{skipped}")
        return f'"{{" space {name}_first_0 "}}"'

    def _after_name(self, value: Any) -> str:
        return f'space ":" space {self._rule(value)} space'

    def _is_possible(self, node: Any) -> bool:
        """Whether a property may be there; only a schema that is false, or combines others, is looked into."""
        if isinstance(node, dict) and (COMBINING.isdisjoint(node) or set(node) <= {"$ref", "anyOf"}):
            return True
        return bool(self._alternatives.of(node))

    def _is_large(self, node: Any) -> bool:
        if id(node) not in self._seen:
            self._large |= self._find_large(node)
        return id(node) in self._large

    def _find_large(self, start: object) -> set[int]:
        """The identities of the schemas from which a number can be reached that the library would change."""
        parts: dict[int, list[int]] = {}
        nodes: list[Mapping[str, Any]] = []
        large: set[int] = set()
        waiting: list[Any] = [start]
        while waiting:
            node = waiting.pop()
            if not isinstance(node, dict) or id(node) in parts:
                continue
            below_it: list[Any] = [part for part, _ in below(node, "") if isinstance(part, dict)]
            below_it += [self._referred(node)] if "$ref" in node else []
            self._seen[id(node)] = node
            parts[id(node)] = list(map(id, below_it))
            waiting += below_it
            nodes.append(node)
            values = [node[name] for name in ("const", "enum") if name in node]
            if has_large([*values, *(node[name] for name in (*BOUNDS, "multipleOf") if name in node)]) or has_written(
                values
            ):
                large.add(id(node))
        large |= inexact_bounds(self._schema, nodes)
        while larger := {node for node, under in parts.items() if node not in large and not large.isdisjoint(under)}:
            large |= larger
        return large

    def _referred(self, node: Mapping[str, Any]) -> object:
        target = referred(self._schema, node["$ref"])
        if not isinstance(target, dict | bool):
            refuse(f"beside the reference {node['$ref'][:40]!r}")
        return target


def _number_patterns(node: Mapping[str, Any], kind: str) -> list[str]:
    """Patterns that a number must match, each of them."""
    divisor = exact(node.get("multipleOf", 1))
    if kind == "integer" or ("multipleOf" in node and divisor == int(divisor)):
        return _integer_patterns(node)
    patterns = _decimal_patterns(node)
    if "multipleOf" not in node:
        return patterns
    sides = [[exact(node[name]) for name in names if name in node] for names in (BOUNDS[::2], BOUNDS[1::2])]
    multiples = decimal_multiples_pattern(divisor, max(sides[0]), min(sides[1])) if all(sides) else None
    return [*patterns, multiples or refuse(f"with 'multipleOf' {str(divisor)[:40]}, unless few multiples are allowed")]


def _integer_patterns(node: Mapping[str, Any]) -> list[str]:
    """Patterns that an integer must match, each of them."""
    low, high = whole_bounds(node)
    _check_order(low, high)
    divisor = exact(node.get("multipleOf", 1))
    if divisor != int(divisor):
        refuse("beside 'multipleOf' that is not whole")
    multiples = multiples_pattern(int(divisor), low, high)
    if multiples is None:
        refuse(f"with 'multipleOf' {str(divisor)[:40]}, unless few multiples are between the bounds")
    if multiples == "()":
        raise EmptyGrammar("no multiple is between the bounds")
    return [integer_pattern(low, high), *([multiples] if divisor != 1 else [])]


def _decimal_patterns(node: Mapping[str, Any]) -> list[str]:
    patterns = [f"-?{integer_pattern(0, None)}{ANY_FRACTION}"]
    low, high = (exact(node[name]) if name in node else None for name in ("minimum", "maximum"))
    above, under = (exact(node[name]) if name in node else None for name in ("exclusiveMinimum", "exclusiveMaximum"))
    for least in (low, above):
        for most in (high, under):
            _check_order(least, most)
    patterns += [] if low is None else [at_least(low)]
    patterns += [] if above is None else [at_least(above, above=True)]
    patterns += [] if high is None else [at_most(high)]
    return patterns + ([] if under is None else [at_most(under, below=True)])


def _check_order(low: Decimal | int | None, high: Decimal | int | None) -> None:
    if low is not None and high is not None and low > high:
        raise EmptyGrammar("a minimum is above the maximum")


def _other_names(names: Sequence[str]) -> str:
    """A terminal of all names in JSON but these."""
    anything = r'/"([^"\\\x00-\x1F\x7F]|\\["\\\/bfnrt])*"/'
    quoted = " | ".join(lark_text(dump(name)) for name in names)
    return f"{anything} & ~({quoted})" if names else anything


def _only(keywords: Sequence[str], allowed: Sequence[str], beside: str) -> None:
    others = [name for name in keywords if name not in allowed]
    if others:
        refuse(f"with the keyword {others[0][:40]!r} beside {beside!r}")
