"""JSON in which numbers keep the text that a client wrote: a constant 1e5 is generated as 1e5, and 1.10 as 1.10.

Numbers are floats as before, so that nobody else has to know. Must not know schemas.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
MOST_DIGITS = 400  # of a number whose decimals are written out


class WrittenFloat(float):
    """A float whose text Python or a grammar library would write differently."""

    __slots__ = ("text",)
    text: str

    def __reduce__(self) -> tuple[Any, ...]:
        return written_float, (self.text,)


def written_float(text: str) -> float:
    """A float from its text in JSON."""
    value = float(text)
    if repr(value) == text and not value.is_integer():
        return value
    written = WrittenFloat(value)
    written.text = text
    return written


def load(text: str) -> Any:
    """As `json.loads`."""
    return json.loads(text, parse_float=written_float)


def dump(value: object) -> str:
    """As `json.dumps`, without white space. The order of properties stays: in it they are generated."""
    return _dump(value) if has_written(value) else _ENCODER.encode(value)


def _dump(value: object) -> str:
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, list):
        return f"[{','.join(map(_dump, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_ENCODER.encode(name)}:{_dump(member)}' for name, member in value.items())}}}"
    return _ENCODER.encode(value)


def has_written(value: object) -> bool:
    """Whether a JSON value contains a number whose text is to be kept."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, WrittenFloat):
            return True
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return False


def exact(number: float) -> Decimal:
    """The number that the text says; with an exponent beyond `MOST_DIGITS`, that of the float."""
    text = number.text if isinstance(number, WrittenFloat) else repr(number)
    exponent = text.lower().partition("e")[2]
    if len(text) > MOST_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > MOST_DIGITS:
        text = repr(float(number)) if isinstance(number, float) else text
    return Decimal(text)
