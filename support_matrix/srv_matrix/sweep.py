"""The values of an argument to try: all choices, both booleans, the boundaries of numbers, a sample string.

They are derived from the declaration: this module must not know any argument by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from srv.args.spec import Argument

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_TEXTS = ("x", "1", "{}", '{"x": 1}', "[]", "x=1", "/x", "127.0.0.1:1", "all", "default", "[2]")
_STEP = 0.01  # distance from the boundary of a fraction


def is_closed(argument: Argument, backends: Iterable[str] = ()) -> bool:
    """Whether all its values can be listed."""
    return argument.kind.base is bool or bool(argument.choices) or bool(tuple(backends))


def values_of(argument: Argument, backends: Iterable[str] = (), more: Iterable[Any] = ()) -> tuple[Any, ...]:
    """The values to try: all are valid by the declaration, and at least one is not the default.

    `backends`: the names that the argument may have on the platform, of backends of its family or of implementations of
    an op; () for other arguments. `more`: additional values to try.
    """
    tried: list[Any] = [argument.default, *_listed(argument, backends), *more]
    if not is_closed(argument, backends):
        tried += _boundaries(argument) if argument.kind.base in (int, float) else _texts(argument)
    allowed: list[Any] = []
    for value in tried:
        is_allowed = any(value == other and type(value) is type(other) for other in allowed)
        if value is not None and not is_allowed and argument.validation_error(value) is None:
            allowed.append(value)
    return tuple(allowed)


def _listed(argument: Argument, backends: Iterable[str]) -> list[Any]:
    if argument.kind.base is bool:
        return [False, True]
    values: list[Any] = list(argument.choices) or _items(argument) or list(backends)
    return [(value,) for value in values] if argument.kind.many else values


def _items(argument: Argument) -> list[Any]:
    """The names that a list argument may contain, if its check lists them."""
    schema = dict(argument.arg.check.schema) if argument.arg.check else {}
    return list(schema.get("items", {}).get("enum", ()))


def _boundaries(argument: Argument) -> list[Any]:
    """The nearest valid value for each number in the check's description, and for twice the default."""
    expected = argument.arg.check.expected if argument.arg.check else ""
    numbers = [float(text) for text in _NUMBER.findall(expected)]
    if isinstance(argument.default, (int, float)):
        numbers.append(argument.default * 2)
    values: list[Any] = []
    for number in numbers or (1.0, 2.0):
        if argument.kind.base is int:
            near: list[Any] = [int(number), int(number) + 1, int(number) - 1]
        else:
            near = [number, number + _STEP, number - _STEP]
        nearest = next(
            (value for boundary in near if _is_valid_alternative(argument, value := _with_part(argument, boundary))),
            None,
        )
        if nearest is not None:
            values.append(nearest)
    return values


def _texts(argument: Argument) -> list[Any]:
    for text in _TEXTS:
        value = _with_part(argument, Path(text) if argument.kind.base is Path else text)
        if _is_valid_alternative(argument, value):
            return [value]
    return []


def _with_part(argument: Argument, part: Any) -> Any:
    """A value of the argument's type with this part: a tuple for a list argument."""
    return (part,) if argument.kind.many else part


def _is_valid_alternative(argument: Argument, value: Any) -> bool:
    return value != argument.default and argument.validation_error(value) is None
