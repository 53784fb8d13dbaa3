"""Patterns of strings in JSON schemas, written so that libraries read them as ECMA-262 does.

Some match the JSON text between the quotation marks: for them, a character that JSON escapes becomes its escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from srv.errors import GrammarError
from srv.grammar.expanded import nodes_of

_ESCAPE = r"\\(?:[pP]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\}|c[A-Za-z]|.)"
_PARTS = re.compile(rf"(?P<escape>{_ESCAPE})|\[(?P<set>\^?(?:\\.|[^\]\\])*)\]|(?P<any>\.)|(?P<text>.)", re.DOTALL)
_IN_SET = re.compile(rf"(?P<escape>{_ESCAPE})|(?P<text>.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_LAST = 0x10FFFF
_ESCAPED = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # what JSON escapes
_NOT_ESCAPED = r'[^"\\\x00-\x1f]'

Range = tuple[int, int]  # the first and the last character

_CLASSES: dict[str, list[Range]] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [
        *((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ],
}


def in_json(pattern: str) -> str:
    """The pattern of the JSON texts, without quotation marks, of the strings that `pattern` matches.

    `.` and sets with `^` match no character that JSON escapes. Raises GrammarError for what has no such pattern.
    """
    return "".join(map(_part, _PARTS.finditer(pattern)))


def write_sets(schema: object) -> None:
    """Write sets of the patterns in a schema so that llguidance reads them as ECMA-262 does, in place.

    The library takes classes ([[:alpha:]]) and operations (&&) in sets. It passes over it that a set excludes
    quotation marks or backslashes if that has all control characters: such a set loses the character NUL.
    """
    for node in nodes_of(schema):
        if "pattern" in node:
            node["pattern"] = _PARTS.sub(_rust_set, node["pattern"])
        if "patternProperties" in node:
            node["patternProperties"] = {
                _PARTS.sub(_rust_set, name): part for name, part in node["patternProperties"].items()
            }


def _rust_set(match: re.Match[str]) -> str:
    inside = match["set"]
    if inside is None or re.search(r"\\[pP]", inside):
        return match.group()
    ranges = _merged(_ranges(inside.removeprefix("^")))
    if inside.startswith("^"):
        ranges = _without([(0, _LAST)], ranges)
    controls, *quoted = (any(low <= first and last <= high for low, high in ranges) for first, last in _ESCAPED)
    if controls and not all(quoted):
        ranges = _without(ranges, [(0, 0)])
    elif inside not in ("", "^") and not re.search(r"\[|&&|--|~~", inside):
        return match.group()
    if not ranges:
        raise GrammarError("a set of a pattern is empty, so that no text matches")
    return f"[{''.join(map(_written, ranges))}]"


def _part(match: re.Match[str]) -> str:
    if match["any"]:
        return _NOT_ESCAPED
    if match["set"] is not None:
        return _set(match["set"])
    if match["text"]:
        text = match["text"]
        return _literal(text) if _is_escaped(text) else text
    name = match["escape"][1]
    if name in "dDwWsS":
        return _set(match["escape"])
    if name in "bB123456789":
        return match["escape"]  # the library says that it has none
    return _literal(_character(match["escape"]))


def _character(escape: str) -> str:
    """The character that an escape stands for."""
    name, rest = escape[1], escape[2:].strip("{}")
    if name in "xu" and rest:
        if int(rest, 16) > _LAST or 0xD800 <= int(rest, 16) < 0xE000:
            raise GrammarError(f"the escape {escape!r} in a pattern is no character of its own")
        return chr(int(rest, 16))
    if name == "c" and rest:
        return chr(ord(rest) % 32)
    if name in _CONTROLS:
        return _CONTROLS[name]
    if name.isascii() and name.isalnum():
        raise GrammarError(f"the escape {escape[:20]!r} in a pattern cannot be enforced; use the backend llguidance")
    return name


def _is_escaped(text: str) -> bool:
    return text < " " or text in '"\\'


def _literal(text: str) -> str:
    if not _is_escaped(text):
        return re.escape(text) if text.isascii() else text
    return f"(?:{_json_escape(text)})"


def _json_escape(text: str) -> str:
    return json.dumps(text)[1:-1].replace("\\", r"\\")


def _set(inside: str) -> str:
    """A set, or an escape of several characters."""
    negative = inside.startswith("^")
    ranges = _merged(_ranges(inside[negative:]))
    if negative:
        return f"[^{''.join(map(_written, _merged([*ranges, *_ESCAPED])))}]"
    plain = _without(ranges, _ESCAPED)
    parts = [f"[{''.join(map(_written, plain))}]"] if plain else []
    codes = [code for low, high in _ESCAPED for code in range(low, high + 1)]
    parts += [_json_escape(chr(code)) for code in codes if any(low <= code <= high for low, high in ranges)]
    if not parts:
        raise GrammarError("a set of a pattern is empty, so that no text matches")
    return parts[0] if plain and len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _ranges(inside: str) -> Iterator[Range]:
    parts = [match.group() for match in _IN_SET.finditer(inside)]
    at = 0
    while at < len(parts):
        low = _members(parts[at])
        if at + 2 < len(parts) and parts[at + 1] == "-" and len(low) == 1:
            high = _members(parts[at + 2])
            if len(high) != 1 or len({*low[0]}) > 1 or len({*high[0]}) > 1 or high[0] < low[0]:
                raise GrammarError(
                    f"a set of a pattern has the range {''.join(parts[at : at + 3])[:40]!r}, which is none"
                )
            yield low[0][0], high[0][0]
            at += 3
        else:
            yield from low
            at += 1


def _members(part: str) -> Sequence[Range]:
    """The characters of one part of a set."""
    if part[0] != "\\" or len(part) == 1:
        return [(ord(part), ord(part))]
    name = part[1]
    if name in "dws":
        return _CLASSES[name]
    if name in "DWS":
        return _without([(0, _LAST)], _CLASSES[name.lower()])
    character = "\b" if name == "b" else _character(part)
    return [(ord(character), ord(character))]


def _merged(ranges: Iterator[Range] | Sequence[Range]) -> list[Range]:
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return merged


def _without(ranges: Sequence[Range], gone: Sequence[Range]) -> list[Range]:
    """The rest of ranges in order."""
    rest = list(ranges)
    for low, high in gone:
        cut = [((first, min(last, low - 1)), (max(first, high + 1), last)) for first, last in rest]
        rest = [(first, last) for pair in cut for first, last in pair if first <= last]
    return rest


def _written(characters: Range) -> str:
    low, high = map(_in_set, characters)
    return low if low == high else f"{low}-{high}"


def _in_set(code: int) -> str:
    if code < 0x20:
        return f"\\x{code:02x}"
    return f"\\{chr(code)}" if chr(code) in "\\]^-[&~" else chr(code)
