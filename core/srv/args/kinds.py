"""Kinds of values: parse a string, convert a YAML or JSON value, and serialise a value, by a type annotation.

Every argument has one kind, derived from its annotation. A kind raises `ValueError` with a clause that
completes "it ..."; the caller, which has the argument's name and source, turns that into a rejection.
"""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
}
_OTHERS: dict[type, str] = {list: "a list", dict: "a mapping"}  # further types that YAML may hold


def _type_of(value: object) -> str:
    """The type of a value, with its article, for messages."""
    return (_NAMES | _OTHERS).get(type(value), f"a {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class Kind:
    """An argument's type. `base`: bool, int, float, str or Path. `many`: a tuple of it. `choices`: from a Literal."""

    base: type
    optional: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name of the type, for help and docs."""
        if self.choices:
            return " | ".join(self.choices)
        return f"list of {self.base.__name__.lower()}" if self.many else self.base.__name__.lower()

    @property
    def expected(self) -> str:
        """The expected value with its article, for messages: "an integer", "one of a, b"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return f"a list, each {_NAMES[self.base]}" if self.many else _NAMES[self.base]

    def parse(self, text: str) -> Any:
        """Parse a string from a command line or an environment variable (lists: comma-separated)."""
        if self.many:
            return tuple(self._parse_one(part.strip()) for part in _members(text) if part.strip())
        return self._parse_one(text)

    def _parse_one(self, text: str) -> Any:
        if "\0" in text:
            raise ValueError("holds a NUL character")
        if self.base is bool:
            lowered = text.lower()
            if lowered not in _TRUE + _FALSE:
                raise ValueError("is neither true nor false")
            return lowered in _TRUE
        if self.base is int:
            if not _INTEGER.fullmatch(text):
                raise ValueError("is not an integer (of at most 19 digits)")
            return int(text)
        if self.base is float:
            return _finite(text)
        return Path(text) if self.base is Path else text

    def read(self, value: object) -> Any:
        """Check and convert a typed value (from YAML or JSON); types are strict, so that 1 is not a string."""
        if value is None:
            if self.optional:
                return None
            raise ValueError("is null")
        if self.many:
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"is not a list of {self.base.__name__}")
            return tuple(self._read_one(part) for part in value)
        return self._read_one(value)

    def _read_one(self, value: object) -> Any:
        expected: type = str if self.base is Path else self.base
        if self.base is float and isinstance(value, int) and not isinstance(value, bool):
            return _finite(str(value))
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise ValueError(f"is not {_NAMES[self.base]} but {_type_of(value)}")
        if isinstance(value, float):
            return _finite(str(value))
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**19:
            raise ValueError("has more than 19 digits")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("holds a NUL character")
        return Path(value) if self.base is Path and isinstance(value, str) else value

    def dump(self, value: Any) -> Any:
        """The value as a JSON-compatible value; `read` is the inverse."""
        if self.many and value is not None:
            return [self._dump_one(part) for part in value]
        return self._dump_one(value)

    def _dump_one(self, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value


def _members(text: str) -> list[str]:
    """The members of a comma-separated list; commas within braces or brackets (JSON) do not separate members."""
    if "{" not in text and "[" not in text:
        return text.split(",")
    members, depth = [""], 0
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth <= 0:
            members.append("")
        else:
            members[-1] += character
    return members


def _finite(text: str) -> float:
    try:
        number = float(text)
    except (ValueError, OverflowError):
        raise ValueError("is not a number") from None
    if not math.isfinite(number):
        raise ValueError("is not finite")
    return number


def kind_of(annotation: Any) -> Kind:
    """The kind of a type annotation (without its `Annotated`); TypeError if the type is not supported."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        inner = [part for part in parts if part is not type(None)]
        if len(inner) != 1 or len(parts) != 2:
            raise TypeError(f"an argument must have one type, or one type and None, not {annotation}")
        kind = kind_of(inner[0])
        return Kind(kind.base, True, kind.many, kind.choices)
    if origin is Literal:
        if not all(isinstance(part, str) for part in parts):
            raise TypeError(f"the choices of an argument must be strings, not {annotation}")
        return Kind(str, choices=typing.cast("tuple[str, ...]", parts))
    if origin is tuple:
        if len(parts) != 2 or parts[1] is not Ellipsis:
            raise TypeError(f"a list argument must be a tuple[T, ...], not {annotation}")
        return Kind(kind_of(parts[0]).base, many=True)
    if annotation not in _NAMES:
        raise TypeError(f"an argument cannot have the type {annotation}")
    return Kind(annotation)
