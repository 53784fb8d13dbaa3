"""Structural tags as Lark grammars: free text in which some parts, such as calls of tools, are constrained.

Two forms are read. The first is that of OpenAI-compatible servers, the second that of XGrammar's documentation:

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "sequence" | "or" | "tag" | "triggered_tags" | ...}}

Text with a special token in it becomes a reference to that token, because a model does not spell it out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from srv.errors import GrammarError
from srv.grammar.backend import prepared_schema
from srv.grammar.inline_json import within_lark
from srv.grammar.json_strings import write_sets
from srv.grammar.lark import lark_pattern, lark_text
from srv.grammar.written import load

_ANY = r"/(.|\n)*/"


class LarkWriter:
    """Writes one grammar. `special`: token ids by their texts. `options`: of JSON schemas. `to_lark`: for grammars."""

    def __init__(self, special: Mapping[str, int], options: Mapping[str, Any], to_lark: Callable[[str], str]) -> None:
        self._special, self._options, self._to_lark = special, options, to_lark
        names = sorted(filter(None, special), key=len, reverse=True)
        self._borders = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []

    def grammar(self, text: str) -> str:
        """The grammar of a structural tag in JSON. Raises GrammarError."""
        try:
            tag = load(text)
        except ValueError as error:
            raise GrammarError(f"it is not JSON: {error}") from None
        if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
            raise GrammarError('it is not an object with "type": "structural_tag"')
        if "format" in tag:
            only(tag, ("type", "format"), "the structural tag")
            start = self._format(tag["format"])
        else:
            start = self._format(from_structures(tag))
        return "\n".join([f"start: {start}", *self._rules, f"TEXT: {_ANY}", ""])

    def _format(self, node: object) -> str:
        if not isinstance(node, dict) or not isinstance(node.get("type"), str):
            raise GrammarError('each format is an object with a "type"')
        kind = node["type"]
        writers: dict[str, tuple[Callable[[Mapping[str, Any]], str], tuple[str, ...]]] = {
            "const_string": (lambda form: self._literal(_text(form, "value")), ("value",)),
            "json_schema": (lambda form: self._json(form.get("json_schema")), ("json_schema", "strict")),
            "grammar": (lambda form: self._nested(self._to_lark(_text(form, "grammar"))), ("grammar",)),
            "regex": (lambda form: self._regex(_text(form, "pattern")), ("pattern",)),
            "sequence": (lambda form: " ".join(map(self._format, _list(form, "elements"))), ("elements",)),
            "or": (lambda form: f"({' | '.join(map(self._format, _list(form, 'elements')))})", ("elements",)),
            "tag": (self._tag, ("begin", "content", "end")),
            "any_text": (lambda form: "TEXT", ()),
            "triggered_tags": (self._triggered, ("triggers", "tags", "at_least_one", "stop_after_first")),
            "tags_with_separator": (self._separated, ("tags", "separator", "at_least_one", "stop_after_first")),
        }
        if kind not in writers:
            raise GrammarError(f"the format {kind[:40]!r} is not one of {', '.join(writers)}")
        write, fields = writers[kind]
        only(node, ("type", *fields), f"the format {kind}")
        return write(node)

    def _tag(self, node: Mapping[str, Any]) -> str:
        return f"{self._literal(_text(node, 'begin'))} {self._content(node)}"

    def _content(self, node: Mapping[str, Any]) -> str:
        """The content of a tag and its end. Any text goes up to the first occurrence of the end."""
        content, end = node.get("content"), _text(node, "end", empty=True)
        if not (isinstance(content, dict) and content.get("type") == "any_text"):
            return f"{self._format(content)} {self._literal(end)}"
        return self._until(end) if end else "TEXT"

    def _triggered(self, node: Mapping[str, Any]) -> str:
        """Free text up to a trigger, then the rest of one of the tags that begin with it, and so on."""
        tags, triggers = _list(node, "tags"), _list(node, "triggers")
        calls: list[str] = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise GrammarError("triggers are texts that are not empty")
            rests = [
                f"{self._literal(begin[len(trigger) :])} {self._content(tag)}"
                for tag in tags
                if (begin := _text(tag, "begin")).startswith(trigger)
            ]
            if not rests:
                raise GrammarError(f"no tag begins with the trigger {trigger[:40]!r}")
            calls.append(f"{self._until(trigger)} ({' | '.join(rests)})")
        lost = [tag for tag in tags if not any(_text(tag, "begin").startswith(trigger) for trigger in triggers)]
        if lost:
            raise GrammarError(f"the tag that begins with {_text(lost[0], 'begin')[:40]!r} begins with no trigger")
        call = self._rule(f"({' | '.join(calls)})")
        if node.get("stop_after_first"):
            return call if node.get("at_least_one") else f"({call} | TEXT)"
        return f"{call}{'+' if node.get('at_least_one') else '*'} TEXT"

    def _separated(self, node: Mapping[str, Any]) -> str:
        tag = self._rule(f"({' | '.join(map(self._tag, _list(node, 'tags')))})")
        separator = self._literal(_text(node, "separator", empty=True))
        several = tag if node.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return f"({several})" if node.get("at_least_one") else f"({several})?"

    def _until(self, text: str) -> str:
        """Any text up to the first occurrence of `text`, and `text`."""
        parts = self._split(text)
        if isinstance(parts[0], int):
            return " ".join(["TEXT", *map(self._part, parts)])
        head = self._rule(f"TEXT {lark_text(parts[0])}", "[lazy]")
        return " ".join([head, *map(self._part, parts[1:])])

    def _literal(self, text: str) -> str:
        return " ".join(map(self._part, self._split(text))) if text else '""'

    def _part(self, part: str | int) -> str:
        return f"<[{part}]>" if isinstance(part, int) else lark_text(part)

    def _split(self, text: str) -> list[str | int]:
        """The text as strings and ids of special tokens."""
        parts: list[str | int] = []
        begin = 0
        for match in self._borders.finditer(text) if self._borders else ():
            parts += [text[begin : match.start()]] if match.start() > begin else []
            parts.append(self._special[match.group()])
            begin = match.end()
        return [*parts, text[begin:]] if begin < len(text) or not parts else parts

    def _json(self, schema: object) -> str:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict) or "x-guidance" in schema:
            raise GrammarError("a schema is an object")
        schema = prepared_schema(schema)
        write_sets(schema)
        return self._rule(within_lark(schema, self._options))

    def _regex(self, pattern: str) -> str:
        return self._rule(lark_pattern(pattern))

    def _nested(self, grammar: str) -> str:
        return self._rule(f"%lark {{\n{grammar}\n}}")

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name


def from_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The older form as a format. Raises GrammarError."""
    only(tag, ("type", "structures", "triggers", "at_least_one"), "the structural tag")
    tags = []
    for structure in _list(tag, "structures"):
        if not isinstance(structure, dict):
            _wrong("structures", "an array of objects")
        only(structure, ("begin", "schema", "end"), "a structure")
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    options = {"at_least_one": bool(tag.get("at_least_one"))}
    return {"type": "triggered_tags", "triggers": _list(tag, "triggers"), "tags": tags, **options}


def _text(node: object, field: str, empty: bool = False) -> str:
    value = node.get(field) if isinstance(node, dict) else None
    if not isinstance(value, str) or not (value or empty):
        _wrong(field, "a text")
    return value


def _list(node: Mapping[str, Any], field: str) -> list[Any]:
    value = node.get(field)
    if not isinstance(value, list) or not value:
        _wrong(field, "an array that is not empty")
    return value


def _wrong(field: str, expected: str) -> NoReturn:
    raise GrammarError(f'"{field}" is not {expected}')


def only(node: Mapping[str, Any], fields: tuple[str, ...], what: str) -> None:
    """Raises GrammarError for a field that is none of these. `what`: has the fields."""
    unknown = [name for name in node if name not in fields]
    if unknown:
        raise GrammarError(f"{what} has the field {unknown[0][:40]!r}; it may have {', '.join(fields)}")
