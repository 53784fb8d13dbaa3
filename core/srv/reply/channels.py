"""A reply of messages with headers (`ChannelFormat`). A header that is wrong is never an error: what cannot be read as
a message is text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from srv.reply.bodies import MAX_HEADER
from srv.reply.output import MAX_NAME, Output
from srv.reply.reader import MarkerSet, Reader, Wait
from srv.reply.rows import ChannelFormat

_TO = "to="
_ROLES = ("assistant",)


def read_channels(row: ChannelFormat, reader: Reader, output: Output, with_tools: bool) -> Wait[None]:
    """Read a whole reply. `with_tools`: calls are looked for."""
    ends = MarkerSet((row.start, row.channel, *row.ends))
    header_begins = (row.channel, row.start, row.message, _TO, *_ROLES)
    while not reader.ended:
        yield from reader.skip_space()
        if not (yield from reader.starts(header_begins)):
            yield from _content(reader, ends, output.text)
        elif (header := (yield from _header(row, reader))) is None:
            reader.at += len((yield from reader.starts((row.channel, row.start, row.message))))
            yield from _content(reader, ends, output.text)
        else:
            yield from _message(row, header, reader, output, ends, with_tools)
        yield from reader.accept(row.ends)
        reader.drop()


class _Header(NamedTuple):
    channel: str
    recipient: str


def _header(row: ChannelFormat, reader: Reader) -> Wait[_Header | None]:
    """The header here; the position is behind it then. None if there is none, or one with unknown words."""
    begin = reader.at
    text = yield from reader.until(MarkerSet((row.message, *row.ends)), MAX_HEADER)
    if text is not None and (yield from reader.accept([row.message])):
        after = text.partition(row.channel)[2]
        for mark in (row.start, row.channel, *row.other):
            text = text.replace(mark, " ")
        recipients = [word.removeprefix(_TO) for word in text.split() if word.startswith(_TO)]
        others = [word for word in text.split() if not word.startswith(_TO)]
        if len(recipients) <= 1 and all(word in row.words for word in others):
            return _Header("".join(after.split()[:1]), "".join(recipients))
    reader.at = begin
    return None


def _message(
    row: ChannelFormat, header: _Header, reader: Reader, output: Output, ends: MarkerSet, with_tools: bool
) -> Wait[None]:
    name = header.recipient.removeprefix(row.functions)
    if with_tools and 0 < len(name) <= MAX_NAME and (header.recipient != name or name in output.schemas):
        output.start(name)
        arguments = _Arguments(output)
        yield from _content(reader, ends, arguments.put)
        arguments.close(reader.cut)
    elif header.channel in row.reasoning:
        output.begin_span(reader.position)
        yield from _content(reader, ends, output.reasoning if output.separate else output.text)
        output.end_span(reader.position)
        if output.separate:
            output.end_reasoning()
    else:
        yield from _content(reader, ends, output.text)


class _Arguments:
    """Puts out arguments without white space before them, and an empty object if there are none."""

    def __init__(self, output: Output) -> None:
        self._output, self._is_empty = output, True

    def put(self, text: str) -> None:
        text = text.lstrip() if self._is_empty else text
        self._is_empty = self._is_empty and not text
        self._output.arguments(text)

    def close(self, cut: bool) -> None:
        if self._is_empty and not cut:
            self._output.arguments("{}")
        self._output.end()


def _content(reader: Reader, ends: MarkerSet, put: Callable[[str], None]) -> Wait[None]:
    """Put out everything up to the next marker."""
    while True:
        match = ends.find(reader.text, reader.at, reader.closed)
        put(reader.text[reader.at : match.position])
        reader.at = match.position
        reader.drop()
        if match.marker or not (yield from reader.more()):
            return
