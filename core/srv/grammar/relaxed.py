"""Schemas that are not strict: what a backend cannot enforce is left out, and the rest of the schema stays.

They are sources that are not strict, and a `json_schema` in a structural tag with "strict": false. Must not know what a
backend enforces: it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from srv.errors import EmptyGrammar, GrammarError, NotEnforceable
from srv.grammar.backend import parsed_schema
from srv.grammar.source import GrammarSource, from_json_schema
from srv.grammar.written import dump, load
from srv.json_schema import ANNOTATIONS, below

MAX_TRIALS = 40  # grammars that are compiled to find out what has to be left out
# Never left out: without them a schema would be another one.
_KEPT = ANNOTATIONS | {"type", "properties", "items", "required", "additionalProperties", "$ref", "anyOf"}


class Relaxed(NamedTuple):
    """A source, and which parts of its schemas are not enforced."""

    source: GrammarSource
    left_out: tuple[str, ...] = ()


def relaxed(source: GrammarSource, check: Callable[[GrammarSource], object]) -> Relaxed:
    """The source with what `check`, which raises GrammarError, takes of the schemas that are not strict."""
    if source.kind == "json_schema" and not source.strict:
        return _relaxed_schema(source, check)
    if source.kind != "structural_tag" or '"strict"' not in source.text:
        return Relaxed(source)
    try:
        tag = load(source.text)
    except (ValueError, RecursionError):
        return Relaxed(source)  # `translate` says what is wrong
    left_out: list[str] = []
    for node in _schema_nodes(tag):
        strict = node.pop("strict", True)
        if not isinstance(strict, bool):
            raise GrammarError('"strict" is not a boolean')
        if not strict:
            schema, gone = _enforceable(node.get("json_schema"), check) or (_type_of(node), ("the schema",))
            node["json_schema"] = schema
            left_out += gone
    return Relaxed(msgspec.structs.replace(source, text=dump(tag)), tuple(dict.fromkeys(left_out)))


def _type_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of a schema of which nothing else can be enforced."""
    schema = node["json_schema"]
    return {"type": schema["type"]} if isinstance(schema, dict) and "type" in schema else {}


def _relaxed_schema(source: GrammarSource, check: Callable[[GrammarSource], object]) -> Relaxed:
    """Raises GrammarError for a schema of which nothing is enforced, or which contradicts itself."""
    try:
        check(source)
        return Relaxed(source)
    except EmptyGrammar:
        raise
    except GrammarError:
        _check_schema(source.text)
        result = _enforceable(load(source.text), check)
        if result is None:
            raise
    return Relaxed(msgspec.structs.replace(source, text=dump(result[0])), result[1])


def _check_schema(text: str) -> None:
    """Raises GrammarError for what is no schema, or contradicts itself."""
    with suppress(NotEnforceable):
        parsed_schema(text)


def _schema_nodes(tag: object) -> Iterator[dict[str, Any]]:
    waiting = [tag]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("type") == "json_schema" and "json_schema" in node:
                yield node
            else:
                waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _enforceable(schema: object, check: Callable[[GrammarSource], object]) -> tuple[object, tuple[str, ...]] | None:
    """The schema without what cannot be enforced, and that; None if nothing can.

    Raises GrammarError for what is no schema or contradicts itself.
    """
    _check_schema(dump(schema))
    trials = MAX_TRIALS

    def works(without: list[tuple[str, object]]) -> bool:
        nonlocal trials
        trials -= 1
        try:
            check(from_json_schema(_without(schema, without), param=""))
        except EmptyGrammar:
            raise  # with all its parts, it has no more values
        except GrammarError:
            return False
        return True

    if works([]):
        return schema, ()
    dropped: list[tuple[str, object]] = []
    for part in _parts(schema):
        if trials <= 0:
            break
        dropped.append(part)
        if works(dropped):
            for keyword in dropped[:-1]:  # which of them were not at fault?
                rest = [other for other in dropped if other != keyword]
                dropped = rest if trials > 0 and works(rest) else dropped
            names = tuple(name if value is None else f"{name} {value}" for name, value in dropped)
            weaker = _without(schema, dropped)
            return (weaker, names) if set(weaker) - ANNOTATIONS else None
    return None


def _parts(schema: object) -> list[tuple[str, object]]:
    """What may be left out: keywords, and formats and patterns each on its own."""
    keywords: dict[tuple[str, object], None] = {}
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            for name, value in node.items():
                if name not in _KEPT:
                    keywords[name, value if name in ("format", "pattern") else None] = None
            waiting += _inside(node)
    return list(keywords)


def _inside(node: Mapping[str, Any]) -> list[object]:
    """The schemas in a schema from which a part may be left out: in `not` and `if`, that would exclude more values."""
    return [part for part, place in below(node, "") if place not in ("/not", "/if")]


def _without(schema: object, parts: list[tuple[str, object]]) -> Any:
    """A copy of a schema without these parts. Of alternatives that exclude each other, any may be taken."""
    copy = load(dump(schema))
    waiting = [copy]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        waiting += _inside(node)
        for name, value in parts:
            if name in node and value in (None, node[name]):
                gone = node.pop(name)
                for other in ("then", "else") if name == "if" else ():
                    node.pop(other, None)
                if name == "oneOf" and "anyOf" not in node:
                    node["anyOf"] = gone
    return copy
