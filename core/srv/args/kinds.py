"""Kinds of values: how a type annotation reads text, reads a YAML or JSON value, and is written back.

Every argument has one kind, taken from its annotation. A kind raises `ValueError` with a clause that
completes "its value ..."; whoever holds the argument's name and source turns that into a refusal.
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
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
}
_OTHERS: dict[type, str] = {list: "a list", dict: "a mapping"}  # that YAML may hold


def _said(value: object) -> str:
    """A value's own kind in words."""
    return (_NAMES | _OTHERS).get(type(value), f"a {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class Kind:
    """`base` is bool, int, float, str or Path; `many`: a tuple of them; `choices` come from a Literal."""

    base: type
    optional: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The kind in words, for help and docs."""
        if self.choices:
            return " | ".join(self.choices)
        return f"list of {self.base.__name__.lower()}" if self.many else self.base.__name__.lower()

    @property
    def wanted(self) -> str:
        """What to give, in words: "a whole number", "one of a, b"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return f"a list, each {_NAMES[self.base]}" if self.many else _NAMES[self.base]

    def parse(self, text: str) -> Any:
        """The value of a text from a command line or an environment variable (lists: comma-separated)."""
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
                raise ValueError("is no whole number (of at most 19 digits)")
            return int(text)
        if self.base is float:
            return _finite(text)
        return Path(text) if self.base is Path else text

    def read(self, value: object) -> Any:
        """The value of an already typed value (YAML, JSON); nothing is guessed, 1 is no text."""
        if value is None:
            if self.optional:
                return None
            raise ValueError("is null")
        if self.many:
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"is no list of {self.base.__name__}")
            return tuple(self._read_one(part) for part in value)
        return self._read_one(value)

    def _read_one(self, value: object) -> Any:
        wanted: type = str if self.base is Path else self.base
        if self.base is float and isinstance(value, int) and not isinstance(value, bool):
            return _finite(str(value))
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"is not {_NAMES[self.base]} but {_said(value)}")
        if isinstance(value, float):
            return _finite(str(value))
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**19:
            raise ValueError("has more than 19 digits")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("holds a NUL character")
        return Path(value) if self.base is Path and isinstance(value, str) else value

    def dump(self, value: Any) -> Any:
        """The value as JSON can hold it; `read` takes it back."""
        if self.many and value is not None:
            return [self._dump_one(part) for part in value]
        return self._dump_one(value)

    def _dump_one(self, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value


def _members(text: str) -> list[str]:
    """The members of a comma-separated list; a comma within braces or brackets (JSON) separates nothing."""
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
        raise ValueError("is no number") from None
    if not math.isfinite(number):
        raise ValueError("is not finite")
    return number


def kind_of(annotation: Any) -> Kind:
    """The kind of a type annotation (without its `Annotated`); TypeError for one that has none."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        inner = [part for part in parts if part is not type(None)]
        if len(inner) != 1 or len(parts) != 2:
            raise TypeError(f"an argument takes one type, or one and None, not {annotation}")
        kind = kind_of(inner[0])
        return Kind(kind.base, True, kind.many, kind.choices)
    if origin is Literal:
        if not all(isinstance(part, str) for part in parts):
            raise TypeError(f"the choices of an argument are texts, not {annotation}")
        return Kind(str, choices=typing.cast("tuple[str, ...]", parts))
    if origin is tuple:
        if len(parts) != 2 or parts[1] is not Ellipsis:
            raise TypeError(f"a list argument is tuple[T, ...], not {annotation}")
        return Kind(kind_of(parts[0]).base, many=True)
    if annotation not in _NAMES:
        raise TypeError(f"no argument can have the type {annotation}")
    return Kind(annotation)
