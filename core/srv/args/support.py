"""A platform's `Support` declarations, converted to the status of a value, or to constraints.

The support matrix and `srv launch` call the same functions, so that a support page cannot contradict a launch.
This module must not know any particular platform.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from srv.args.config import ARGUMENTS, find_argument
from srv.args.spec import Argument
from srv.kept import kept_per_object
from srv.platform.facts import Constraint, ResolutionContext, Support

REFUSED = ("unsupported", "not_applicable")


@dataclass(frozen=True, slots=True)
class SupportStatus:
    """How a platform supports one value, or an argument as a whole. `status`: one of `srv.platform.facts.SUPPORT`."""

    status: str
    reason: str
    since: str = ""


def by_argument(support: Iterable[Support]) -> dict[str, tuple[Support, ...]]:
    """Declarations by argument name; those that name no argument of `srv` are left out."""
    grouped: dict[str, list[Support]] = {}
    for declaration in support:
        argument = find_argument(declaration.argument)
        if argument is not None and argument.name in ARGUMENTS:
            grouped.setdefault(argument.name, []).append(declaration)
    return {name: tuple(declared) for name, declared in grouped.items()}


@kept_per_object
def by_argument_on(support: tuple[Support, ...], variant: str) -> Mapping[str, tuple[Support, ...]]:
    """The declarations that apply to a variant, by argument name."""
    return {name: on_variant(variant, declared) for name, declared in by_argument(support).items()}


def on_variant(variant: str, support: Iterable[Support]) -> tuple[Support, ...]:
    """The declarations that apply to a variant."""
    return tuple(declaration for declaration in support if not declaration.variants or variant in declaration.variants)


def support_of_value(argument: Argument, value: Any, support: Sequence[Support]) -> SupportStatus | None:
    """The status of one value by the declarations of one argument on one variant; None if none applies.

    A declaration for this value takes precedence over one with `only`, and that over one for all values.
    """
    for declaration in support:
        if any(part in declaration.values for part in _members(argument, value)):
            return SupportStatus(declaration.status, declaration.reason, declaration.since)
    for declaration in support:
        if declaration.only and value != argument.default:
            if all(part in declaration.only for part in _members(argument, value)):
                return SupportStatus("supported", "", declaration.since)
            return SupportStatus("unsupported", declaration.reason, declaration.since)
    for declaration in support:
        if not declaration.values and not declaration.only:
            if declaration.status in REFUSED and value == argument.default:
                return SupportStatus("supported", "", declaration.since)
            return SupportStatus(declaration.status, declaration.reason, declaration.since)
    return None


def support_of_argument(support: Sequence[Support]) -> SupportStatus | None:
    """The status of an argument as a whole, by its declarations on one variant; None if there are none."""
    for declaration in support:
        if not declaration.values and not declaration.only:
            return SupportStatus(declaration.status, declaration.reason, declaration.since)
    for declaration in support:
        limiting = declaration.only or declaration.status != "supported"
        return SupportStatus("limited" if limiting else "supported", declaration.reason, declaration.since)
    return None


@kept_per_object
def constraints_from_support(support: tuple[Support, ...]) -> tuple[Constraint, ...]:
    """Constraints that refuse values declared unsupported or not applicable.

    A declaration for an argument that `srv` does not have yields no constraint, because nobody can set that argument;
    the support matrix reports it.
    """
    return tuple(
        _constraint(ARGUMENTS[name], declared)
        for name, declared in by_argument(support).items()
        if any(declaration.only or declaration.status in REFUSED for declaration in declared)
    )


def _constraint(argument: Argument, support: Sequence[Support]) -> Constraint:
    def check(context: ResolutionContext) -> str | None:
        status = support_of_value(argument, context[argument.name], on_variant(context.device.variant, support))
        return status.reason if status is not None and status.status in REFUSED else None

    return Constraint(argument.name, "unsupported", check, f"Leave {argument.flag} out.")


def _members(argument: Argument, value: Any) -> tuple[Any, ...]:
    """The members of a list value; a tuple of the value itself for any other."""
    return value if argument.kind.many and isinstance(value, tuple) else (value,)
