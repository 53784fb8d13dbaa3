"""The grammar of values in calls with bare keys (`BareBody`), by the schema of an argument.

    {city:Q Paris Q,near:[{name:Q x Q,km:2}]}        Q: the format's quote, without spaces around

A string goes up to the next quote. Numbers, booleans and null are JSON. Objects have the members that their schemas
declare, or any if they declare none; a value without a type is no object and no array. Sources: public parsers of
these calls, and documents that quote the macro `format_argument` of the chat templates of Gemma 4 and FunctionGemma;
the templates themselves were not at hand. Must not know how a grammar is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.json_schema import ANNOTATIONS
from srv.reply.keyword_arguments import Format, keyword_arguments, tag
from srv.reply.typed_values import resolved

KEY = re.compile(r"[^\s{}\[\],:\"<>]+")
_NUMERIC = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_SCALARS = ("number", "integer", "boolean", "null")
_WITHIN = ANNOTATIONS | {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
_OF_TYPE: dict[str, frozenset[str]] = {
    "number": _NUMERIC,
    "integer": _NUMERIC,
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items"}),
}
_MAX_VALUES = 300  # of one argument: a reference may repeat them at each level


class Unwritable(Exception):
    """A schema that no value of this form can be given a grammar for; the text says what of it."""


class BareValue(NamedTuple):
    """`texts`: the alternatives that are no JSON. `scalars`: the schema of the others, or None.
    `left_out`: keywords of the schema that no alternative has."""

    texts: list[Format]
    scalars: dict[str, Any] | None
    left_out: list[str]


class BareValues:
    """Writes one argument. `root`: where references point into. `strict`: whether the tool is."""

    def __init__(self, quote: str, root: Mapping[str, Any], strict: bool) -> None:
        self._quote, self._root, self._strict, self._count = quote, root, strict, 0

    def argument(self, part: Any) -> tuple[Format, list[str]]:
        """The format of values that follow `part`, and the keywords that it lacks. Raises Unwritable."""
        value = self._value(part)
        return self._format(value), value.left_out

    def _format(self, value: BareValue) -> Format:
        formats = list(value.texts)
        if value.scalars is not None:
            node: Format = {"type": "json_schema", "json_schema": value.scalars}
            formats.append(node if self._strict else {**node, "strict": False})
        if not formats:
            raise Unwritable("allows no value")
        return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}

    def _value(self, part: Any) -> BareValue:
        self._count += 1
        if self._count > _MAX_VALUES:
            raise Unwritable(f"has more than {_MAX_VALUES} values within each other")
        part = resolved({} if part is True or part is None else part, self._root)
        if not isinstance(part, Mapping):
            raise Unwritable("allows no value, or refers to what is not there")
        for name in ("anyOf", "oneOf", "allOf"):
            members = part.get(name)
            if isinstance(members, list) and members and (name != "allOf" or len(members) == 1):
                return _merged([self._value(member) for member in members], part)
        if "const" in part or isinstance(part.get("enum"), list):
            return self._listed([part["const"]] if "const" in part else part["enum"], part)
        return self._typed(part)

    def _typed(self, part: Mapping[str, Any]) -> BareValue:
        kinds = part.get("type", ["string", *_SCALARS])
        kinds = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if isinstance(kind, str)]
        keywords = _WITHIN.union(*(_OF_TYPE.get(kind, ()) for kind in kinds))
        texts, left_out = [], [name for name in part if name not in keywords]
        if "string" in kinds:
            texts.append(tag(self._quote, {"type": "any_text"}, self._quote))
        if "object" in kinds:
            texts += self._object(part, left_out)
        if "array" in kinds:
            items = self._value(part.get("items"))
            left_out += items.left_out
            texts += _several("[", self._format(items), "]")
        scalars = [kind for kind in kinds if kind in _SCALARS]
        of_scalars = {"type": scalars, **{name: part[name] for name in _NUMERIC if name in part}} if scalars else None
        return BareValue(texts, of_scalars, left_out)

    def _object(self, part: Mapping[str, Any], left_out: list[str]) -> list[Format]:
        properties, required = part.get("properties"), part.get("required")
        if not isinstance(properties, Mapping) or not properties:
            further = part.get("additionalProperties", True)
            if further is False:
                return [{"type": "const_string", "value": "{}"}]
            value = self._value(further)
            left_out += value.left_out
            key: Format = {"type": "regex", "pattern": KEY.pattern}
            member = [key, {"type": "const_string", "value": ":"}, self._format(value)]
            return _several("{", {"type": "sequence", "elements": member}, "}")
        values: dict[str, Format] = {}
        for name, schema in properties.items():
            if schema is False:
                continue
            if not KEY.fullmatch(name):
                raise Unwritable(f"has a member {name[:40]!r}, whose name cannot be written")
            value = self._value(schema)
            values[name] = self._format(value)
            left_out += value.left_out
        required = required if isinstance(required, list) else []
        elements = keyword_arguments(values, {name: name in required for name in values}, ":", ",")
        if not elements:
            return [{"type": "const_string", "value": "{}"}]
        return [tag("{", {"type": "sequence", "elements": elements}, "}")]

    def _listed(self, values: list[Any], part: Mapping[str, Any]) -> BareValue:
        texts = [value for value in values if isinstance(value, str)]
        scalars = [value for value in values if value is None or isinstance(value, bool | int | float)]
        if len(texts) + len(scalars) < len(values) or any(self._quote in text for text in texts):
            raise Unwritable("lists values that cannot be written")
        tags = [tag(f"{self._quote}{text}", {"type": "const_string", "value": self._quote}, "") for text in texts]
        return BareValue(tags, {"enum": scalars} if scalars else None, [name for name in part if name not in _WITHIN])


def _several(begin: str, one: Format, end: str) -> list[Format]:
    """The alternatives of any number of these with commas between them, which may have no text of their own to begin
    with."""
    behind = {"type": "tags_with_separator", "tags": [tag(",", one, "")], "separator": ""}
    none = {"type": "const_string", "value": f"{begin}{end}"}
    return [tag(begin, {"type": "sequence", "elements": [one, behind]}, end), none]


def _merged(values: list[BareValue], part: Mapping[str, Any]) -> BareValue:
    scalars = [value.scalars for value in values if value.scalars is not None]
    left_out = [name for name in part if name not in _WITHIN]
    return BareValue(
        [text for value in values for text in value.texts],
        None if not scalars else scalars[0] if len(scalars) == 1 else {"anyOf": scalars},
        left_out + [name for value in values for name in value.left_out],
    )
