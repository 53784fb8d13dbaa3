"""What a platform declares of arguments, read as law: `Support` in, the status of a value or a constraint out.

The support matrix and the launch read the same functions, so that a page cannot say what a launch would not do.
Nothing here knows a platform beyond its declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from srv.args.config import ARGUMENTS, find_argument
from srv.args.spec import Argument
from srv.platform.facts import Constraint, Seen, Support

REFUSED = ("unsupported", "not_applicable")


@dataclass(frozen=True, slots=True)
class Said:
    """A platform's word on one value, or on an argument as a whole: a status of `srv.platform.facts.SUPPORT`."""

    status: str
    reason: str
    since: str = ""


def by_argument(support: Iterable[Support]) -> dict[str, tuple[Support, ...]]:
    """Declarations by the name of their argument; those that name no argument of `srv` are left out."""
    grouped: dict[str, list[Support]] = {}
    for each in support:
        argument = find_argument(each.argument)
        if argument is not None and argument.name in ARGUMENTS:
            grouped.setdefault(argument.name, []).append(each)
    return {name: tuple(said) for name, said in grouped.items()}


def on_variant(variant: str, said: Iterable[Support]) -> tuple[Support, ...]:
    """Those of the declarations that speak of a variant."""
    return tuple(each for each in said if not each.variants or variant in each.variants)


def said_of_value(argument: Argument, value: Any, said: Sequence[Support]) -> Said | None:
    """What `said` (of one argument, on one variant) makes of one value: the narrowest speaks; None if none does."""
    for each in said:
        if any(part in each.values for part in _parts(argument, value)):
            return Said(each.status, each.reason, each.since)
    for each in said:
        if each.only and value != argument.default:
            supported = all(part in each.only for part in _parts(argument, value))
            return Said("supported", "", each.since) if supported else Said("unsupported", each.reason, each.since)
    for each in said:
        if not each.values and not each.only:
            if each.status in REFUSED and value == argument.default:
                return Said("supported", "", each.since)
            return Said(each.status, each.reason, each.since)
    return None


def said_of_argument(said: Sequence[Support]) -> Said | None:
    """What `said` (of one argument and one variant) makes of an argument as a whole; None if it says nothing."""
    for each in said:
        if not each.values and not each.only:
            return Said(each.status, each.reason, each.since)
    for each in said:
        limiting = each.only or each.status != "supported"
        return Said("limited" if limiting else "supported", each.reason, each.since)
    return None


def refusing(support: Sequence[Support]) -> tuple[Constraint, ...]:
    """The constraints that refuse what is declared unsupported or not applicable.

    A declaration of an argument that `srv` does not have refuses nothing: nobody can set it. The support
    matrix reports it.
    """
    return tuple(
        _constraint(ARGUMENTS[name], said)
        for name, said in by_argument(support).items()
        if any(each.only or each.status in REFUSED for each in said)
    )


def _constraint(argument: Argument, support: Sequence[Support]) -> Constraint:
    def check(seen: Seen) -> str | None:
        said = said_of_value(argument, seen[argument.name], on_variant(seen.device.variant, support))
        return said.reason if said is not None and said.status in REFUSED else None

    return Constraint(argument.name, "unsupported", check, f"Leave {argument.flag} out.")


def _parts(argument: Argument, value: Any) -> tuple[Any, ...]:
    return value if argument.kind.many and isinstance(value, tuple) else (value,)
