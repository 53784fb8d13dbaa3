"""Reads the part of Python's regular expressions that an automaton can match in linear time.

Owns the syntax, and which characters a class contains (those of Python's `re` on str). Must not know matching.

    choice   = sequence { "|" sequence }
    sequence = { atom [ "*" | "+" | "?" | "{m,n}" ] [ "?" ] }
    atom     = character | "." | "[...]" | "\\d" ... | "(" [ "?:" | "?P<name>" ] choice ")"

What depends on the text around a match (anchors, word boundaries, lookaround) or on an earlier part of it
(backreferences) is refused by name. Flags i and s are read at the start: "(?i)...".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from srv.errors import RequestError

MAX_DEPTH = 32  # of groups
MAX_COUNT = 1000  # of a repetition; larger ones are too large for an automaton anyway
_FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")
_COUNTS = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_GROUP = re.compile(r"\?(?::|P<\w+>)")
_ESCAPES = MappingProxyType({"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"})
_DIGITS = "0123456789"
_HEX_DIGITS = MappingProxyType({"x": 2, "u": 4, "U": 8})
_KINDS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {"d": str.isdecimal, "w": lambda character: character.isalnum() or character == "_", "s": str.isspace}
)
_REFUSED_ESCAPES = MappingProxyType(dict.fromkeys("AZz", "anchors") | dict.fromkeys("bB", "word boundaries"))
_REFUSED_GROUPS = (
    ("?=", "lookahead"),
    ("?!", "lookahead"),
    ("?<=", "lookbehind"),
    ("?<!", "lookbehind"),
    ("?>", "atomic groups"),
    ("?P=", "backreferences"),
    ("?(", "conditional groups"),
    ("?#", "comments"),
)


@dataclass(frozen=True, slots=True)
class Characters:
    """One character: of these ranges (first and last), or of these kinds (d, D, w, W, s, S)."""

    ranges: tuple[tuple[str, str], ...] = ()
    kinds: tuple[str, ...] = ()
    negated: bool = False
    ignore_case: bool = False

    def __contains__(self, character: str) -> bool:
        forms = {character, character.lower(), character.upper()} if self.ignore_case else {character}
        return any(self._lists(form) for form in forms if len(form) == 1) != self.negated

    def _lists(self, character: str) -> bool:
        return any(first <= character <= last for first, last in self.ranges) or any(
            _KINDS[kind.lower()](character) != kind.isupper() for kind in self.kinds
        )


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class RegexChoice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part`, from `least` to `most` times; None: any number of times."""

    part: Node
    least: int
    most: int | None


Node = Characters | Sequence | RegexChoice | Repeat


class Size(NamedTuple):
    """Of a tree in which repetitions are written out."""

    characters: int
    nodes: int


def size(node: Node) -> Size:
    match node:
        case Characters():
            return Size(1, 1)
        case Sequence(nodes) | RegexChoice(nodes):
            sizes = [size(child) for child in nodes]
            return Size(
                sum(part_size.characters for part_size in sizes), 1 + sum(part_size.nodes for part_size in sizes)
            )
        case Repeat(part, least, most):
            count, repeated = max(1, least) if most is None else most, size(part)
            return Size(repeated.characters * count, 1 + repeated.nodes * count)


def parse(pattern: str) -> Node:
    """The tree of a regular expression. Raises RequestError with the reason alone."""
    return _Parser(pattern).parse()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at, self._depth = pattern, 0, 0
        self._ignore_case = self._any_line = False

    def parse(self) -> Node:
        if flags := _FLAGS.match(self._pattern):
            if unknown := set(flags[1]) - {"i", "s"}:
                raise self._error(f"flag {min(unknown)} is not supported, only i and s are")
            self._ignore_case, self._any_line = "i" in flags[1], "s" in flags[1]
            self._at = flags.end()
        node = self._choice()
        if self._at < len(self._pattern):
            raise self._error("a parenthesis is closed that was not opened")
        return node

    def _error(self, reason: str) -> RequestError:
        return RequestError(f"{reason} (at character {self._at})", code="invalid_value")

    @property
    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        character = self._next
        self._at += 1
        return character

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._next == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else RegexChoice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._next not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, atom: Node) -> Node:
        counts = self._counts()
        if counts is None:
            return atom
        if self._next == "?":  # where a match ends first does not depend on it
            self._at += 1
        elif self._next == "+":
            raise self._error("possessive repetitions are not supported")
        if self._next in ("*", "+", "?") or (self._next == "{" and _COUNTS.match(self._pattern, self._at)):
            raise self._error("a repetition is repeated; put it into a group")
        return Repeat(atom, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if (counts := simple.get(self._next)) is not None:
            self._at += 1
            return counts
        match = _COUNTS.match(self._pattern, self._at)
        if match is None or match[0] == "{}":
            return None
        if max(len(match[1]), len(match[3])) > len(str(MAX_COUNT)):
            raise self._error(f"a repetition of more than {MAX_COUNT}")
        least = int(match[1] or 0)
        most = (int(match[3]) if match[3] else None) if match[2] else least
        if most is not None and most < least:
            raise self._error("a repetition whose maximum is less than its minimum")
        self._at = match.end()
        return least, most

    def _atom(self) -> Node:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == ".":
            return Characters(() if self._any_line else (("\n", "\n"),), negated=True)
        if character == "\\":
            return self._escape()
        if character in "^$":
            raise self._error(f"anchors ({character}) are not supported; the expression is searched for anywhere")
        self._check_repeats(character)
        return self._characters(((character, character),))

    def _check_repeats(self, character: str) -> None:
        if character in "*+?":
            raise self._error(f"{character} has nothing to repeat")

    def _characters(self, ranges: tuple[tuple[str, str], ...], kinds: tuple[str, ...] = ()) -> Characters:
        return Characters(ranges, kinds, ignore_case=self._ignore_case)

    def _group(self) -> Node:
        for start, name in _REFUSED_GROUPS:
            if self._pattern.startswith(start, self._at):
                raise self._error(f"{name} are not supported" if name.endswith("s") else f"{name} is not supported")
        if self._next == "?":
            kind = _GROUP.match(self._pattern, self._at)
            if kind is None:
                raise self._error("an unknown kind of group; flags belong at the start")
            self._at = kind.end()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} groups inside each other")
        node = self._choice()
        if self._take() != ")":
            raise self._error("a parenthesis is not closed")
        self._depth -= 1
        return node

    def _escape(self) -> Characters:
        letter = self._next
        if letter.lower() in _KINDS and letter:
            self._at += 1
            return self._characters((), (letter,))
        if letter in _REFUSED_ESCAPES:
            raise self._error(f"{_REFUSED_ESCAPES[letter]} (\\{letter}) are not supported")
        character = self._escaped()
        return self._characters(((character, character),))

    def _escaped(self) -> str:
        """The character that a backslash and what follows it stand for."""
        letter = self._take()
        if letter == "0" and self._next in _DIGITS and self._next:
            raise self._error("octal escapes are not supported; use \\x")
        if letter in _ESCAPES:
            return _ESCAPES[letter]
        if letter in _HEX_DIGITS:
            digits = self._pattern[self._at : self._at + _HEX_DIGITS[letter]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX_DIGITS[letter]}}}", digits) or int(digits, 16) > 0x10FFFF:
                raise self._error(f"\\{letter} without the {_HEX_DIGITS[letter]} digits of a character")
            self._at += len(digits)
            return chr(int(digits, 16))
        if letter in _DIGITS and letter:
            raise self._error("backreferences are not supported")
        if not letter or (letter.isascii() and letter.isalpha()):
            raise self._error(f"unknown escape \\{letter}")
        return letter

    def _class(self) -> Characters:
        negated = self._next == "^"
        self._at += negated
        ranges: list[tuple[str, str]] = []
        kinds: list[str] = []
        first = True
        while first or self._next != "]":
            first = False
            low = self._member()
            if low in _KIND_ESCAPES:
                kinds.append(low[1])
                continue
            high = low
            if self._next == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if high in _KIND_ESCAPES or high < low:
                    raise self._error("a range of characters that ends before it begins")
            ranges.append((low, high))
        self._at += 1
        return Characters(tuple(ranges), tuple(kinds), negated, self._ignore_case)

    def _member(self) -> str:
        """One character of a class, or a backslash and the letter of a kind."""
        character = self._take()
        if not character:
            raise self._error("a character class is not closed")
        if character != "\\":
            return character
        if self._next in _REFUSED_ESCAPES:
            if self._next != "b":
                raise self._error(f"unknown escape \\{self._next}")
            self._at += 1
            return "\b"
        if self._next and self._next.lower() in _KINDS:
            return character + self._take()
        return self._escaped()


_KIND_ESCAPES = frozenset(f"\\{letter}" for kind in _KINDS for letter in (kind, kind.upper()))
