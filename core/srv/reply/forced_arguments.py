"""The grammar of the arguments of a call that are no object of JSON: between tags, keyword arguments of Python, or with
bare keys.

Between tags (`TaggedBody`), a string is text, and any other value is JSON, so that a schema is enforced by its parts:
which arguments a call has, and the values of those that are no strings. Strings have the values of `enum` or any.
Values in Python (`PythonBody`) are JSON, which the parser reads too; `bare_values` writes those with bare keys, and
`nested_values` those that consist of tags. What a schema says beyond that is returned. Must not know how a grammar is
compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from keyword import iskeyword
from typing import Any, NamedTuple

from srv.errors import RequestError
from srv.json_schema import ANNOTATIONS
from srv.reply.bare_values import KEY, BareValues, Unwritable
from srv.reply.keyword_arguments import Format, keyword_arguments, optional
from srv.reply.nested_values import STRUCTURED, TAG_NAME, NestedValues, NotInTags, may_be_tag, one_of
from srv.reply.rows import BareBody, Markers, PythonBody, TaggedBody
from srv.reply.tools import Tool
from srv.reply.typed_values import property_types

_ROOT = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_DEFINITIONS = ("$defs", "definitions")


class Arguments(NamedTuple):
    """`elements`: formats of structural tags, one after another. `left_out`: keywords of the schema that they lack."""

    elements: list[Format]
    left_out: tuple[str, ...]


def arguments_of(body: TaggedBody | PythonBody | BareBody, tool: Tool, markers: Markers) -> Arguments:
    """The arguments of a call, in the order of the schema. Raises RequestError for a name that cannot be written.

    markers: of the format, which no argument may have as its tag.
    """
    schema = tool.parameters or {}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    required = required if isinstance(required, list) else []  # of draft 3, it is a boolean
    every = dict.fromkeys([*properties, *required])
    names = {name: name in required for name in every if name in required or properties.get(name) is not False}
    for name in names:
        _check_name(body, tool, name, markers)
    match body:
        case PythonBody():
            arguments, missing = _keywords(tool, names)
        case BareBody():
            arguments, missing = _bare(body, tool, names)
        case TaggedBody():
            arguments, missing = _tags(body, tool, names)
    return Arguments(arguments, tuple(dict.fromkeys([*(name for name in schema if name not in _ROOT), *missing])))


def _check_name(body: TaggedBody | PythonBody | BareBody, tool: Tool, name: str, markers: Markers) -> None:
    match body:
        case PythonBody():
            fine = name.isidentifier() and not iskeyword(name)
        case BareBody():
            fine = KEY.fullmatch(name) is not None
        case TaggedBody():
            fine = may_be_tag(name) if body.nested else TAG_NAME.fullmatch(name) is not None
            fine = fine and f"{body.key[0]}{name}{body.key[1]}" not in markers
    if not fine:
        param = f"{tool.where}.{tool.schema_field}"
        raise RequestError(
            f"{param} is refused: the argument {name[:40]!r} has a name that a forced call of this model cannot have;"
            ' rename it, or send tool_choice = "auto"',
            code="invalid_value",
            param=param,
        )


def _tags(body: TaggedBody, tool: Tool, names: Mapping[str, bool]) -> tuple[list[Format], list[str]]:
    tags_ = [(is_required, *_argument(body, tool, name)) for name, is_required in names.items()]
    elements = [one_of(tags) if is_required else optional(tags) for is_required, tags, _ in tags_]
    return elements, [keyword for _, _, missing in tags_ for keyword in missing]


def _keywords(tool: Tool, names: Mapping[str, bool]) -> tuple[list[Format], list[str]]:
    values = {name: _json(tool, _part(tool, name)) for name in names}
    missing = [keyword for _, keywords in values.values() for keyword in keywords]
    return keyword_arguments({name: value for name, (value, _) in values.items()}, names, "=", ", "), missing


def _bare(body: BareBody, tool: Tool, names: Mapping[str, bool]) -> tuple[list[Format], list[str]]:
    values: dict[str, Format] = {}
    missing: list[str] = []
    for name in names:
        try:
            values[name], keywords = BareValues(body.quote, tool.parameters or {}, tool.strict).argument(
                _part(tool, name)
            )
        except Unwritable as reason:
            param = f"{tool.where}.{tool.schema_field}"
            raise RequestError(
                f"{param} is refused: the argument {name[:40]!r} {reason}, so that a forced call of this model cannot"
                ' have it; declare its type and members, or send tool_choice = "auto"',
                code="not_implemented",
                param=param,
            ) from None
        missing += keywords
    return keyword_arguments(values, names, ":", ","), missing


def _argument(body: TaggedBody, tool: Tool, name: str) -> tuple[list[Format], list[str]]:
    """The tags of one argument, one for each form of its value, and the keywords that they do not have."""
    part, types = _part(tool, name), property_types(tool.parameters or {}, name)
    if body.nested and types & STRUCTURED and "string" not in types:
        with suppress(NotInTags):
            return NestedValues(body, tool.parameters or {}, lambda schema: _json(tool, schema)[0]).tags(name, part), []
    keywords = [keyword for keyword in part if keyword not in ANNOTATIONS]
    texts = _texts(part, body) if types == {"string"} else None
    if types == {"string"} and (texts or keywords == ["type"]):
        content: Format = {"type": "any_text"}
        if texts:
            content = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
        return [_tag(body, name, body.raw, content)], []
    if body.raw or (types and "string" not in types):
        node, missing = _json(tool, part)
        return [_tag(body, name, _mark_of_json(body, types), node)], missing
    # Any text has one of several types.
    free = all(
        isinstance(branch, Mapping) and set(branch) <= {"type", *ANNOTATIONS} for branch in part.get("anyOf", [])
    )
    missing = [keyword for keyword in keywords if keyword != "type" and not (free and keyword == "anyOf")]
    return [_tag(body, name, "", {"type": "any_text"})], missing


def _part(tool: Tool, name: str) -> Mapping[str, Any]:
    """The schema of an argument. One that the tool does not declare is a string, as for the parser."""
    part = (tool.parameters or {}).get("properties", {}).get(name, {"type": "string"})
    return part if isinstance(part, Mapping) else {} if part else {"not": {}}


def _texts(part: Mapping[str, Any], body: TaggedBody) -> list[str] | None:
    """The texts that a schema lists; None if it does not, or says more."""
    if not set(part) - ANNOTATIONS <= {"type", "enum", "const"}:
        return None
    values = [part["const"]] if "const" in part else part.get("enum", [])
    end = body.end.partition("{key}")[0] if body.nested else body.end
    fine = all(isinstance(value, str) and value and end not in value for value in values)
    return list(values) if values and fine else None


def _json(tool: Tool, part: Mapping[str, Any]) -> tuple[Format, list[str]]:
    schema = tool.parameters or {}
    whole = {**{name: schema[name] for name in _DEFINITIONS if name in schema}, **part}
    missing: list[str] = []
    if any(reference in json.dumps(whole) for reference in ('"$ref": "#"', '"$ref": "#/properties')):
        whole, missing = {}, ["$ref"]
    node: Format = {"type": "json_schema", "json_schema": whole}
    return (node if tool.strict else {**node, "strict": False}), missing


def _mark_of_json(body: TaggedBody, types: set[str]) -> str:
    """What stands behind the name of an argument that is no text."""
    kind = min(types - {"string", "null"}, default="object").replace("integer", "number")
    return body.json or body.raw.replace('"string"', f'"{kind}"')


def _tag(body: TaggedBody, name: str, mark: str, content: Format) -> Format:
    """White space stands before a tag: text goes up to the first occurrence of the next tag."""
    newline = "\n" if body.newline else ""
    begin = f"{body.gap}{body.key[0]}{name}{mark}{body.key[1]}"
    begin += (f"{body.gap}{body.value}" if body.value else "") + newline
    end = body.end.replace("{key}", name) if body.nested else body.end
    end = end if content["type"] == "any_text" else newline + end
    return {"type": "tag", "begin": begin, "content": content, "end": end}
