"""Arguments that have an effect only together with another one, as their declarations say (`Arg.only_with`).

A value that a user sets without the other argument is refused: it would be accepted and ignored. Values that come
from defaults are not, because nobody expects an effect of them. This module must not know any argument by name.
"""

from __future__ import annotations

from typing import Any

from srv.args.config import ARGUMENTS
from srv.args.rules.inert import EFFECTIVE_WITH
from srv.args.spec import Argument
from srv.platform.facts import Constraint, ResolutionContext


def _constraint(argument: Argument) -> Constraint:
    others = tuple(ARGUMENTS[name] for name in argument.arg.only_with)

    def check(context: ResolutionContext) -> str | None:
        if context[argument.name] == argument.default:
            return None
        if any(context[other.name] != other.default for other in others):
            return None
        unset = " and ".join(f"{other.name} is {other.show(other.default)}" for other in others)
        return f"it has no effect while {unset}"

    remedy = f"Set {' or '.join(argument.arg.only_with)} too, or leave it out."
    return Constraint(argument.name, "other_missing", check, remedy, argument.arg.only_with)


PREREQUISITES: tuple[Constraint, ...] = tuple(
    _constraint(argument) for argument in ARGUMENTS.values() if argument.arg.only_with
)


def with_prerequisite(name: str, value: Any) -> dict[str, Any]:
    """The value by its argument's name, after a value of another argument if it has an effect only with one.

    For programs that try values one at a time.
    """
    argument = ARGUMENTS[name]
    if value != argument.default and name in EFFECTIVE_WITH:
        return {**EFFECTIVE_WITH[name], name: value}
    if not argument.arg.only_with or value == argument.default:
        return {name: value}
    other = ARGUMENTS[argument.arg.only_with[0]]
    return {other.name: _other_than_default(other), name: value}


def _other_than_default(argument: Argument) -> Any:
    if argument.kind.base is bool:
        return not argument.default
    if argument.choices:
        return next(
            value for value in argument.choices if value != argument.default and argument.planned_reason(value) is None
        )
    if argument.kind.base in (int, float):
        return 1 if argument.default is None else argument.default + 1
    text = argument.kind.base("x")
    return (text,) if argument.kind.many else text
