"""The bodies of calls whose arguments are JSON: streamed as the model writes them.

A reader of a body returns False if the text is not such a call; nothing of it has been put out then. Once the name and
the beginning of the arguments are known, the call has started, and what follows belongs to it even if it is not valid.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from srv.reply.json_text import JsonScanner, parsed, read_string, skip_value
from srv.reply.output import MAX_NAME, Output
from srv.reply.reader import MarkerSet, Reader, Wait
from srv.reply.rows import HeaderBody, JsonBody

MAX_HEADER = 300  # characters of a name with what stands around it
_EXTRA = ("id", "call_id", "tool_call_id", "type")


class BodyPlace(NamedTuple):
    """Where a body is read. `stops`: the markers at which the arguments end that are not valid.

    `declared`: only a tool of the request is called, and with arguments; anything else is text.
    """

    reader: Reader
    output: Output
    stops: MarkerSet
    declared: bool = False

    def may_call(self, name: str) -> bool:
        return 0 < len(name) <= MAX_NAME and (not self.declared or name in self.output.schemas)


def stream_object(place: BodyPlace) -> Wait[bool]:
    """Put out the JSON object here as arguments, and what a model writes after it goes wrong, up to the next marker.

    False if it went wrong.
    """
    reader, output, scanner = place.reader, place.output, JsonScanner()
    while True:
        end = scanner.scan(reader.text, reader.at)
        output.arguments(reader.text[reader.at : end])
        reader.at = end
        reader.drop()
        if scanner.done:
            return True
        if scanner.broken:
            yield from stream_raw(place)
            return False
        if not (yield from reader.more()):
            return False


def stream_raw(place: BodyPlace) -> Wait[None]:
    """Put out everything up to the next marker as arguments."""
    reader = place.reader
    while True:
        match = place.stops.find(reader.text, reader.at, reader.closed)
        place.output.arguments(reader.text[reader.at : match.position])
        reader.at = match.position
        reader.drop()
        if match.marker or not (yield from reader.more()):
            return


def put_call(output: Output, name: str, arguments: str, call_id: str | None = None) -> None:
    output.start(name, call_id)
    output.arguments(arguments)
    output.end()


def json_body(body: JsonBody, place: BodyPlace) -> Wait[bool]:
    """Objects that are no calls are text behind the calls, if others in their list are calls."""
    reader, output = place.reader, place.output
    first, others = output.calls, list[str]()
    yield from reader.skip_space()
    is_list = bool((yield from reader.accept(["["])))
    while True:
        begin, before = reader.at, output.calls
        yield from reader.skip_space()
        if not (yield from _object(body, place)):
            if output.calls > before:
                break
            reader.at = begin
            yield from reader.skip_space()
            other = (yield from skip_value(reader)) if is_list else None
            if other is None:
                reader.at = begin
                break
            others.append(other)
        if is_list and (yield from reader.accept_behind_space(["]"])):
            break
        if output.calls > first:
            reader.drop()
        begin = reader.at
        yield from reader.skip_space()
        if not (yield from reader.accept([","] if is_list else body.separators)) and (yield from reader.peek()) != "{":
            reader.at = begin
            break
    if output.calls > first:
        output.text("\n".join(others))
    return output.calls > first


def _object(body: JsonBody, place: BodyPlace) -> Wait[bool]:
    """One object. False if it is no call, or one whose end is wrong."""
    reader, output = place.reader, place.output
    if not (yield from reader.accept(["{"])):
        return False
    if body.keyed:
        return (yield from _keyed_object(place))
    name = call_id = arguments = None
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(["}"])):
            break
        key = yield from _key(reader)
        if key in body.names and name is None:
            name = yield from read_string(reader)
            if name is None or not place.may_call(name):
                return False
        elif key in _EXTRA:
            extra = yield from skip_value(reader)
            if extra is None:
                return False
            call_id = parsed(extra) if key != "type" and isinstance(parsed(extra), str) else call_id
        elif key in body.arguments and arguments is None and name is not None and (yield from reader.peek()) == "{":
            output.start(name, call_id)
            is_valid = yield from stream_object(place)
            output.end()
            return is_valid and (yield from _end_of_object(reader))
        elif key in body.arguments and arguments is None:
            arguments = _as_object((yield from skip_value(reader)))
            if arguments is None:
                return False
        else:
            return False
        yield from reader.skip_space()
        if not (yield from reader.accept([","])) and (yield from reader.peek()) != "}":
            return False
    if name is None or (place.declared and arguments is None):
        return False
    put_call(output, name, arguments or "{}", call_id)
    return True


def _keyed_object(place: BodyPlace) -> Wait[bool]:
    """The inside of an object whose one member is the name, with the arguments as its value."""
    reader, output = place.reader, place.output
    yield from reader.skip_space()
    name = yield from _key(reader)
    if name is None or not place.may_call(name):
        return False
    if (yield from reader.peek()) == "{":
        output.start(name)
        is_valid = yield from stream_object(place)
        output.end()
        return is_valid and (yield from _end_of_object(reader))
    arguments = _as_object((yield from skip_value(reader)))
    if arguments is None:
        return False
    put_call(output, name, arguments)
    return (yield from _end_of_object(reader))


def _key(reader: Reader) -> Wait[str | None]:
    key = yield from read_string(reader)
    yield from reader.skip_space()
    if key is None or not (yield from reader.accept([":"])):
        return None
    yield from reader.skip_space()
    return key


def _as_object(text: str | None) -> str | None:
    """Arguments that came before the name, as text of JSON, or not at all; None if they are no object."""
    if text is None:
        return None
    value = parsed(text)
    if isinstance(value, str):
        text, value = value, parsed(value) if value.strip() else None
    if isinstance(value, dict):
        return text
    return "{}" if value is None and text.strip() in ("", "null") else None


def _end_of_object(reader: Reader) -> Wait[bool]:
    """Move behind the end of an object whose arguments have been put out; other known members are left out."""
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(["}"])):
            return True
        begin = reader.at
        if not (yield from reader.accept([","])):
            return False
        yield from reader.skip_space()
        key = yield from _key(reader)
        if key not in _EXTRA or (yield from skip_value(reader)) is None:
            reader.at = begin
            return False


def header_body(body: HeaderBody, place: BodyPlace) -> Wait[bool]:
    reader, output = place.reader, place.output
    ends = MarkerSet((*body.separator, *body.stays, *place.stops.markers))
    header = yield from reader.until(ends, MAX_HEADER)
    if header is None:
        return False
    match = re.fullmatch(body.header, header.strip())
    if match is None or not place.may_call(match["name"]):
        return False
    if not (yield from reader.accept(body.separator)) and not (yield from reader.starts(body.stays)):
        return False
    yield from reader.skip_space()
    name, call_id = match["name"], match.groupdict().get("id")
    if (yield from reader.peek()) != "{":
        if not reader.ended and not (yield from reader.starts((*place.stops.markers, *body.suffix))):
            return False
        put_call(output, name, "" if reader.ended and reader.cut else "{}", call_id)
    else:
        output.start(name, call_id)
        yield from stream_object(place)
        output.end()
    yield from reader.accept_behind_space(body.suffix)
    return True
