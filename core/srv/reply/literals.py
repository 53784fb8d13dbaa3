"""The bodies of calls whose values are literals: of Python (`PythonBody`), or with bare keys (`BareBody`).

A call is put out when it is complete, because its text is no JSON. It is read as data: nothing is evaluated.
"""

from __future__ import annotations

import ast
import re

from srv.reply.bodies import BodyPlace, put_call
from srv.reply.json_text import MAX_DEPTH, json_of, parsed
from srv.reply.python_values import NOT_READABLE, expression, literal
from srv.reply.reader import Reader, Wait
from srv.reply.rows import BareBody, PythonBody

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_NAME_SIZE = 256
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class BracketScanner:
    """Finds the bracket that closes the one with which a text begins. `quotes`: what strings stand between."""

    def __init__(self, quotes: tuple[str, ...], escapes: bool) -> None:
        self._quotes, self._escapes = quotes, escapes
        self._stack: list[str] = []
        self._quote = ""

    def scan(self, reader: Reader) -> Wait[bool]:
        """Move the reader behind the closing bracket. False if none fits, or none comes."""
        while True:
            if self._quote:
                if self._escapes and (yield from reader.peek()) == "\\":
                    reader.at += 1
                    yield from reader.peek()
                    reader.at += 1
                    continue
                if (yield from reader.accept([self._quote])):
                    self._quote = ""
                    continue
            elif quote := (yield from reader.accept(self._quotes)):
                self._quote = quote
                continue
            character = yield from reader.peek()
            if not character:
                return False
            reader.at += 1
            if self._quote:
                continue
            if character in _CLOSING:
                self._stack.append(_CLOSING[character])
                if len(self._stack) > MAX_DEPTH:
                    return False
            elif character in ")]}":
                if not self._stack or self._stack.pop() != character:
                    return False
                if not self._stack:
                    return True


def _name(reader: Reader) -> Wait[str]:
    """The name here, once what follows shows that it is complete; the position stays. "" if there is none."""
    while True:
        match = _NAME.match(reader.text, reader.at)
        end = reader.at if match is None else match.end()
        if end - reader.at > _NAME_SIZE:
            return ""
        if end < len(reader.text) or not (yield from reader.more()):
            return "" if match is None else match[0]


def python_body(body: PythonBody, place: BodyPlace) -> Wait[bool]:
    reader, output = place.reader, place.output
    first = output.calls
    yield from reader.skip_space()
    if body.brackets and not (yield from reader.accept([body.brackets[0]])):
        return False
    others: list[str] = []  # calls with something else than literals
    while True:
        begin = reader.at
        yield from reader.skip_space()
        start = reader.at
        name = yield from _name(reader)
        reader.at += len(name)
        if not place.may_call(name) or (yield from reader.peek()) != "(":
            reader.at = begin
            break
        if not (yield from BracketScanner(('"', "'"), True).scan(reader)):
            reader.at = begin
            break
        text = reader.text[start : reader.at]
        if (arguments := _python_arguments(name, text)) is None:
            others.append(text)
        else:
            put_call(output, name, arguments)
        if output.calls > first:
            reader.drop()
        if body.brackets and (yield from reader.accept_behind_space([body.brackets[1]])):
            break
        begin = reader.at
        if not (yield from reader.accept_behind_space([","])) and body.brackets:
            break
    if output.calls > first:
        output.text("\n".join(others))
    return output.calls > first


def _python_arguments(name: str, text: str) -> str | None:
    """The JSON text of the keyword arguments of a call; None if it is no call with literals."""
    try:
        call = expression("f" + text[len(name) :])
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        values = {keyword.arg: literal(keyword.value) for keyword in call.keywords}
        is_complete = None not in values and len(values) == len(call.keywords)
        return json_of(values, allow_nan=False) if is_complete else None
    except NOT_READABLE:
        return None


def bare_body(body: BareBody, place: BodyPlace) -> Wait[bool]:
    reader, output = place.reader, place.output
    yield from reader.skip_space()
    if not (yield from reader.accept([body.begin])):
        return False
    name = yield from _name(reader)
    reader.at += len(name)
    begin = reader.at
    if not place.may_call(name) or (yield from reader.peek()) != "{":
        return False
    if not (yield from BracketScanner((body.quote,), False).scan(reader)):
        return False
    arguments = _bare_arguments(reader.text[begin : reader.at], body.quote)
    if arguments is None:
        return False
    put_call(output, name, arguments)
    reader.drop()
    return True


def _bare_arguments(text: str, quote: str) -> str | None:
    """The JSON text of `{key:value, ..}`; None if something else than strings and keys keeps it from being JSON."""
    parts = text.split(quote)
    outside = [_quote_keys(part) if index % 2 == 0 else json_of(part) for index, part in enumerate(parts)]
    joined = "".join(outside)
    return joined if isinstance(parsed(joined), dict) else None


def _quote_keys(text: str) -> str:
    return re.sub(r'([{,]\s*)([^\s{}\[\],:"][^{}\[\],:"]*?)\s*:', lambda match: f"{match[1]}{json_of(match[2])}:", text)
