"""Which values of an argument are tried: every choice, both booleans, the boundaries of numbers, a sample of text.

Everything comes from the declaration; nothing here knows an argument by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from srv.args.spec import Argument

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_TEXTS = ("x", "1", "{}", '{"x": 1}', "[]", "x=1", "/x", "127.0.0.1:1", "all", "default")
_STEP = 0.01  # beside the boundary of a fraction


def is_closed(argument: Argument, backends: Iterable[str] = ()) -> bool:
    """Whether its values can be listed one by one."""
    return argument.kind.base is bool or bool(argument.choices) or bool(argument.arg.family and tuple(backends))


def values_of(argument: Argument, backends: Iterable[str] = (), more: Iterable[Any] = ()) -> tuple[Any, ...]:
    """The values to try, each of which the declaration itself allows; one at least is not the default.

    `backends`: the names that the platform offers for the argument's family. `more`: values that some
    platform prefers, tried too.
    """
    tried: list[Any] = [argument.default, *_listed(argument, backends), *more]
    if not is_closed(argument, backends):
        tried += _boundaries(argument) if argument.kind.base in (int, float) else _texts(argument)
    allowed: list[Any] = []
    for value in tried:
        known = any(value == each and type(value) is type(each) for each in allowed)
        if value is not None and not known and argument.against(value) is None:
            allowed.append(value)
    return tuple(allowed)


def _listed(argument: Argument, backends: Iterable[str]) -> list[Any]:
    if argument.kind.base is bool:
        return [False, True]
    listed: list[Any] = list(argument.choices) or (list(backends) if argument.arg.family else [])
    return [(each,) for each in listed] if argument.kind.many else listed


def _boundaries(argument: Argument) -> list[Any]:
    """Beside each number that the check names, the nearest allowed; then a value away from the default."""
    wants = argument.arg.check.wants if argument.arg.check else ""
    named = [float(text) for text in _NUMBER.findall(wants)]
    if isinstance(argument.default, (int, float)):
        named.append(argument.default * 2)
    found: list[Any] = []
    for number in [*named, *(() if named else (1.0, 2.0))]:
        if argument.kind.base is int:
            near: list[Any] = [int(number), int(number) + 1, int(number) - 1]
        else:
            near = [number, number + _STEP, number - _STEP]
        nearest = next((value for each in near if _stands(argument, value := _whole(argument, each))), None)
        if nearest is not None:
            found.append(nearest)
    return found


def _texts(argument: Argument) -> list[Any]:
    for text in _TEXTS:
        value = _whole(argument, Path(text) if argument.kind.base is Path else text)
        if _stands(argument, value):
            return [value]
    return []


def _whole(argument: Argument, part: Any) -> Any:
    """A value of the argument's type that holds this part."""
    return (part,) if argument.kind.many else part


def _stands(argument: Argument, value: Any) -> bool:
    return value != argument.default and argument.against(value) is None
