"""The bodies of calls in which tags stand around the name and each argument (`TaggedBody`).

The arguments become JSON while they arrive: a string in the pieces in which it comes, any other value when it is
complete, because its type depends on all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.reply.bodies import MAX_HEADER, BodyPlace
from srv.reply.json_text import json_of
from srv.reply.nested import nested_json
from srv.reply.reader import MarkerSet, Wait
from srv.reply.rows import TaggedBody
from srv.reply.typed_values import as_json, property_types


def tagged_body(body: TaggedBody, place: BodyPlace) -> Wait[bool]:
    reader, output = place.reader, place.output
    yield from reader.skip_space()
    before = yield from reader.accept([body.name[0]])
    if body.name[0] and not before:
        return False
    name = yield from reader.until(MarkerSet((*body.name[1], *place.stops.markers)), MAX_HEADER)
    name = None if name is None else _without_attributes(body, name.strip())
    if name is None or not _is_name(name) or not place.may_call(name):
        return False
    if not (yield from reader.starts(body.name[1])):
        return False
    yield from reader.accept([mark for mark in body.name[1] if mark not in body.stays])
    output.start(name)
    output.arguments("{")
    reader.drop()
    rest = yield from _arguments(body, place, output.schemas.get(name, {}))
    output.end()
    if rest:
        output.text(rest)
    return True


def _without_attributes(body: TaggedBody, text: str) -> str:
    return text.partition(body.attributes)[0] if body.attributes else text


def _is_name(name: str) -> bool:
    return bool(name) and not any(character.isspace() or character in '<>"{}' for character in name)


def _arguments(body: TaggedBody, place: BodyPlace, schema: Mapping[str, Any]) -> Wait[str]:
    """The arguments up to the end of the call. Returns the text between them that belongs to none."""
    reader, output = place.reader, place.output
    others = (body.name[0],) if body.name[0] else ()
    marks = MarkerSet((body.key[0], *body.close, *place.stops.markers, *others))
    strays = [""]  # one text for each gap between arguments, however it arrived
    count = 0
    while True:
        match = marks.find(reader.text, reader.at, reader.closed)
        strays[-1] += reader.text[reader.at : match.position]
        reader.at = match.position
        reader.drop()
        if not match.marker:
            if (yield from reader.more()):
                continue
            output.arguments("" if reader.cut else "}")
            break
        if match.marker == body.key[0]:
            reader.at += len(match.marker)
            if (yield from _argument(body, place, schema, ", " if count else "")):
                count += 1
                strays.append("")
            else:
                strays[-1] += match.marker
            continue
        output.arguments("}")
        reader.at += len(match.marker) if match.marker in body.close else 0
        break
    return " ".join(text for stray in strays if (text := stray.strip()))


def _argument(body: TaggedBody, place: BodyPlace, schema: Mapping[str, Any], comma: str) -> Wait[bool]:
    """One argument, whose opening tag has been read. False if its name is wrong; nothing more is read then."""
    reader, output = place.reader, place.output
    begin = reader.at
    key = yield from reader.until(MarkerSet((body.key[1], *place.stops.markers)), MAX_HEADER)
    if key is None or not (yield from reader.accept([body.key[1]])):
        reader.at = begin
        return False
    if body.value:
        yield from reader.skip_space()
        if not (yield from reader.accept([body.value])):
            reader.at = begin
            return False
    key, types = _types(body, key.strip(), schema)
    body = body._replace(end=body.end.replace("{key}", key)) if body.nested else body
    output.arguments(f"{comma}{json_of(key)}: ")
    reader.drop()
    is_nested = body.nested and (yield from reader.starts((body.key[0], body.end))) == body.key[0]
    if types == {"string"} and not is_nested:
        output.arguments('"')
        if (yield from _value(body, place, True)) is not None:
            output.arguments('"')
    else:
        value = (yield from _nested_value(body, place, key)) if is_nested else (yield from _value(body, place, False))
        value = value or ""
        arguments = nested_json(body.key, value, key, schema) if body.nested else as_json(value, types)
        output.arguments(value if reader.ended and reader.cut else arguments)
    return True


def _types(body: TaggedBody, key: str, schema: Mapping[str, Any]) -> tuple[str, set[str]]:
    """The name of an argument and its types; some formats say beside the name whether the value is a string."""
    for mark, types in ((body.raw, {"string"}), (body.json, set[str]())):
        if mark and key.endswith(mark):
            return key.removesuffix(mark), types
    if body.attributes and body.attributes in key:
        return _without_attributes(body, key), set()
    return key, property_types(schema, key)


def _nested_value(body: TaggedBody, place: BodyPlace, key: str) -> Wait[str]:
    """The text of a value of tags, in which tags of the same name may be."""
    text, begin = "", f"{body.key[0]}{key}{body.key[1]}"
    while True:
        text += (yield from _value(body, place, False)) or ""
        if place.reader.ended or text.count(begin) <= text.count(body.end):
            return text
        text += body.end


def _value(body: TaggedBody, place: BodyPlace, streamed: bool) -> Wait[str | None]:
    """The text of a value, or, if `streamed`, put out as the inside of a JSON string.

    None for one that was put out and that the end of the reply cuts.
    """
    reader, output = place.reader, place.output
    newline = "\n" if body.newline else ""
    ends = MarkerSet((body.end, newline + body.end, *body.cut))
    if newline:
        yield from reader.accept([newline])
        reader.drop()
    parts: list[str] = []
    while True:
        match = ends.find(reader.text, reader.at, reader.closed)
        piece = reader.text[reader.at : match.position]
        reader.at = match.position
        reader.drop()
        if streamed:
            output.arguments(json_of(piece)[1:-1])
        else:
            parts.append(piece)
        if match.marker:
            reader.at += len(match.marker) if match.marker.endswith(body.end) else 0
            return "".join(parts)
        if not (yield from reader.more()):
            return "".join(parts) if not streamed or not reader.cut else None
