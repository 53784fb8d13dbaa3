"""Reads JSON text that arrives in parts, without building or changing it."""

from __future__ import annotations

import json
import re
from typing import Any

from srv.reply.reader import Reader, Wait

MAX_DEPTH = 200
_STRING_PART = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_IS_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_VALUE, _KEY, _FIRST_KEY, _COLON, _AFTER, _FIRST_VALUE = range(6)


class JsonScanner:
    """Finds the end of one JSON value. Control characters in strings are accepted, as models write them.

    `done`: the value is complete. `broken`: it is not JSON; the text that was scanned before is fine.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expected = _VALUE
        self._in_string = self._escaped = False
        self._is_key = False
        self._word = ""
        self.done = self.broken = False

    def scan(self, text: str, at: int) -> int:
        """Scan on from `at`, and return where scanning stopped: at the end of the text, of the value, or of what is
        JSON."""
        size = len(text)
        while at < size and not (self.done or self.broken):
            at = self._string(text, at) if self._in_string else self._structure(text, at)
        return at

    def close(self) -> None:
        """No more text comes: a number at the end is complete."""
        if self._word and not self._stack and _IS_SCALAR.fullmatch(self._word):
            self.done = True

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _STRING_PART.match(text, at)
        assert match is not None
        at = match.end()
        if at >= len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self._expected = _COLON if self._is_key else _AFTER
            self._end_value()
        return at + 1

    def _structure(self, text: str, at: int) -> int:
        character = text[at]
        if self._word or (self._expected in (_VALUE, _FIRST_VALUE) and character in "-0123456789tfn"):
            return self._scalar(text, at)
        if character in " \t\r\n":
            return at + 1
        if not self._step(character):
            self.broken = True
            return at
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        match = _WORD.match(text, at)
        assert match is not None
        self._word += match[0]
        if match.end() < len(text):
            if not _IS_SCALAR.fullmatch(self._word):
                self.broken = True
                return match.end()
            self._word, self._expected = "", _AFTER
            self._end_value()
        return match.end()

    def _step(self, character: str) -> bool:
        expected, inside = self._expected, self._stack[-1] if self._stack else ""
        if expected in (_VALUE, _FIRST_VALUE):
            if character == '"':
                self._in_string, self._is_key = True, False
            elif character in "{[" and len(self._stack) < MAX_DEPTH:
                self._stack.append(character)
                self._expected = _FIRST_KEY if character == "{" else _FIRST_VALUE
            else:
                return expected == _FIRST_VALUE and character == "]" and self._pop()
        elif expected in (_KEY, _FIRST_KEY):
            if character == '"':
                self._in_string = self._is_key = True
            else:
                return expected == _FIRST_KEY and character == "}" and self._pop()
        elif expected == _COLON:
            self._expected = _VALUE
            return character == ":"
        elif character == ",":
            self._expected = _KEY if inside == "{" else _VALUE
        else:
            return character == ("}" if inside == "{" else "]") and self._pop()
        return True

    def _pop(self) -> bool:
        self._stack.pop()
        self._expected = _AFTER
        self._end_value()
        return True

    def _end_value(self) -> None:
        if not self._stack and self._expected == _AFTER:
            self.done = True


def skip_value(reader: Reader) -> Wait[str | None]:
    """The text of the JSON value here; None if it is not JSON, or not complete."""
    start, at, scanner = reader.at, reader.at, JsonScanner()
    while True:
        at = scanner.scan(reader.text, at)
        if scanner.done:
            reader.at = at
            return reader.text[start:at]
        if scanner.broken:
            return None
        if not (yield from reader.more()):
            scanner.close()
            if not scanner.done:
                return None
            reader.at = at
            return reader.text[start:at]


def read_string(reader: Reader) -> Wait[str | None]:
    """The string whose opening quote is here; None if there is none."""
    if (yield from reader.peek()) != '"':
        return None
    text = yield from skip_value(reader)
    value = None if text is None else parsed(text)
    return value if isinstance(value, str) else None


def parsed(text: str) -> Any:
    """The value of JSON text, control characters in strings included; None if it is not JSON.

    Half of a surrogate pair becomes a question mark: no text of UTF-8 can have it.
    """
    try:
        value = json.loads(text, strict=False)
        if "\\u" in text:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        return value
    except (ValueError, RecursionError):
        return None


def json_of(value: Any, *, allow_nan: bool = True) -> str:
    """The JSON text of a value. Half of a surrogate pair stays an escape: no text of UTF-8 can have it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
    return text.encode(errors="backslashreplace").decode()
