"""What is wrong with a row of the tables of formats. Rows of other distributions are checked when they are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from srv.reply.rows import BareBody, Body, HeaderBody, JsonBody, Marks, PythonBody, ReasoningFormat, ToolFormat

_IDS = ("call", "short")


def fault_of(row: ToolFormat | ReasoningFormat) -> tuple[str, str] | None:
    """The first wrong member of a row and what is wrong with it; None if all are right."""
    return next(_faults(row), None)


def _faults(row: ToolFormat | ReasoningFormat) -> Iterator[tuple[str, str]]:
    if not _texts(row.aliases, True):
        yield "aliases", _not(row.aliases, "a tuple of texts")
    if not isinstance(row.templates, tuple) or not all(_texts(template) for template in row.templates):
        yield "templates", _not(row.templates, "a tuple of tuples of texts")
    yield from _tool_faults(row) if isinstance(row, ToolFormat) else _reasoning_faults(row)


def _reasoning_faults(row: ReasoningFormat) -> Iterator[tuple[str, str]]:
    if not _marks(row.marks) or not row.marks.end:
        yield "marks", _not(row.marks, "Marks with begin and end, which are tuples of texts")
    for name in ("ends_before", "around"):
        if not _texts(getattr(row, name), True):
            yield name, _not(getattr(row, name), "a tuple of texts")


def _tool_faults(row: ToolFormat) -> Iterator[tuple[str, str]]:
    for name in ("section", "call"):
        marks = getattr(row, name)
        if marks is not None and not _marks(marks):
            yield name, _not(marks, "Marks whose begin and end are tuples of texts")
    if row.section is None and row.call is None and not row.unmarked and not row.bare:
        yield "call", "is missing, and so is section: nothing says where a call begins"
    for name in ("bare", "ambiguous"):
        if not _texts(getattr(row, name), True):
            yield name, _not(getattr(row, name), "a tuple of texts")
    if not isinstance(row.bodies, tuple) or not row.bodies:
        yield "bodies", _not(row.bodies, "a tuple of bodies")
        return
    for index, body in enumerate(row.bodies):
        if why := _body_fault(body):
            yield f"bodies[{index}]", why
    if not isinstance(row.frame, tuple) or list(map(type, row.frame)) != [str, str]:
        yield "frame", _not(row.frame, "a tuple of two texts")
    if row.ids not in _IDS and _is_no_id(row.ids):
        yield "ids", _not(row.ids, '"call", "short" or a format string of name and index')


def _is_no_id(ids: str) -> bool:
    """Whether a text is no format string of an id."""
    try:
        return "{index}" not in ids or not ids.format(name="f", index=0)
    except (KeyError, IndexError, ValueError):
        return True


def _body_fault(body: Any) -> str:
    match body:
        case JsonBody():
            fine = _texts(body.names) and _texts(body.arguments) and _texts(body.separators, True)
            return "" if fine else _not(body, "a JsonBody of tuples of texts")
        case HeaderBody():
            return "" if _texts(body.separator) and _has_name(body.header) else _not(body.header, _HEADER)
        case PythonBody():
            fine = isinstance(body.brackets, str) and len(body.brackets) in (0, 2)
            return "" if fine else _not(body.brackets, 'two brackets or ""')
        case BareBody():
            return "" if body.quote and body.begin else _not(body, "a BareBody with quote and begin")
    if not isinstance(body, get_args(Body)):
        return _not(body, f"one of {', '.join(kind.__name__ for kind in get_args(Body))}")
    pairs = _texts(body.key) and len(body.key) == 2 and len(body.name) == 2 and _texts(body.name[1])
    return "" if pairs and body.end else _not(body, "a TaggedBody with tags around the name, the key and the value")


_HEADER = "a regular expression with the group name, behind which a separator stands"


def _has_name(pattern: Any) -> bool:
    try:
        return "name" in re.compile(pattern).groupindex
    except (re.error, TypeError):
        return False


def _marks(marks: Any) -> bool:
    return isinstance(marks, Marks) and _texts(marks.begin) and _texts(marks.end, True)


def _texts(value: Any, may_be_empty: bool = False) -> bool:
    is_tuple = isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)
    return is_tuple and (may_be_empty or bool(value))


def _not(value: Any, expected: str) -> str:
    return f"is {value!r}, not {expected}"
