"""The grammar of values written as tags that are named after their members, by the schema of an argument.

    <near><item><name>x</name><km>2</km></item></near>

An object has the members that its schema declares, in its order, and an array any number of tags `item`. A string is
text, and a number, a boolean or null is JSON. Of a schema that says more, or declares no members, the whole argument
is JSON, which `srv.reply.nested` reads as well. Must not know how a grammar is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from srv.json_schema import ANNOTATIONS
from srv.reply.keyword_arguments import Format, optional, tag
from srv.reply.nested import ITEM
from srv.reply.rows import TaggedBody
from srv.reply.typed_values import resolved, types_of

TAG_NAME = re.compile(r"[^<>\"\s](?:[^<>\"\n]*[^<>\"\s])?")
STRUCTURED = frozenset({"object", "array"})
_OF_TYPE = {"object": {"properties", "required", "additionalProperties"}, "array": {"items"}}
_MAX_VALUES = 300  # of one argument: a reference may repeat them at each level
_MAX_DEPTH = 20


class NotInTags(Exception):
    """A schema that tags cannot express."""


class NestedValues:
    """Writes one argument. `root`: where references point into. `json`: makes the format of a value that is JSON."""

    def __init__(self, body: TaggedBody, root: Mapping[str, Any], json: Callable[[Mapping[str, Any]], Format]) -> None:
        self._body, self._root, self._json, self._count = body, root, json, 0

    def tags(self, name: str, part: Any, depth: int = 0) -> list[Format]:
        """The tags of this name, one for each form that its value may have. Raises NotInTags."""
        if not may_be_tag(name):
            raise NotInTags
        begin, end = f"{self._body.key[0]}{name}{self._body.key[1]}", self._body.end.replace("{key}", name)
        return [tag(begin, content, end) for content in self._contents(part, depth)]

    def _contents(self, part: Any, depth: int) -> list[Format]:
        self._count += 1
        part = resolved({} if part is True else part, self._root)
        if self._count > _MAX_VALUES or depth > _MAX_DEPTH or not isinstance(part, Mapping):
            raise NotInTags
        types, keywords = types_of(part, self._root), set(part) - ANNOTATIONS
        if not types or "string" in types:
            return _texts(part, types, keywords)
        if not types & STRUCTURED:
            return [self._json(part)]
        for name in ("anyOf", "allOf"):
            if keywords == {name} and (name == "anyOf" or len(part[name]) == 1):
                return self._alternatives(part[name], depth)
        structured = types & STRUCTURED
        if len(structured) > 1 or not keywords <= {"type"}.union(*(_OF_TYPE[kind] for kind in structured)):
            raise NotInTags
        scalars = sorted(types - STRUCTURED)
        content = self._object(part, depth) if "object" in structured else self._array(part, depth)
        return [content, self._json({"type": scalars})] if scalars else [content]

    def _alternatives(self, parts: list[Any], depth: int) -> list[Format]:
        """The forms of several schemas, of which at most one has tags: the parser does not try one after another."""
        if sum(bool(types_of(part, self._root) & STRUCTURED) for part in parts) > 1:
            raise NotInTags
        return [content for part in parts for content in self._contents(part, depth + 1)]

    def _object(self, part: Mapping[str, Any], depth: int) -> Format:
        properties, required = part.get("properties"), part.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list) or set(required) - set(properties):
            raise NotInTags
        elements = []
        for name, schema in properties.items():
            tags = self.tags(name, schema, depth + 1)
            elements.append(one_of(tags) if name in required else optional(tags))
        if not elements:
            raise NotInTags
        return {"type": "sequence", "elements": elements}

    def _array(self, part: Mapping[str, Any], depth: int) -> Format:
        tags = self.tags(ITEM, part.get("items"), depth + 1)
        return {"type": "tags_with_separator", "tags": tags, "separator": ""}


def may_be_tag(name: str) -> bool:
    """Whether a tag may be named so: one that begins with a slash is the end of another."""
    return TAG_NAME.fullmatch(name) is not None and not name.startswith("/")


def one_of(formats: list[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _texts(part: Mapping[str, Any], types: set[str], keywords: set[str]) -> list[Format]:
    """Of a value that may be a string, or anything. The parser gives text the type that it looks like."""
    if keywords <= {"type"} and not types & STRUCTURED:
        return [{"type": "any_text"}]
    values = part.get("enum", [part.get("const")])
    if types != {"string"} or not keywords <= {"type", "enum", "const"} or len(keywords & {"enum", "const"}) != 1:
        raise NotInTags
    if not all(isinstance(value, str) and value and not set(value) & set("<>") for value in values):
        raise NotInTags
    return [{"type": "const_string", "value": value} for value in values]
