"""Refusals that name arguments as the user named them, for example by an alias.

Core and plugins refuse values with the declared names and flags of arguments. If the user set an argument by an alias,
the reason and the remedy name that alias instead, because it is what the user will look for. `Rejection.what` keeps the
declared name, because programs read it. A deprecated switch is not such an alias, because it takes other values.

Of two refusals of a value, one of which gives useless advice, this module leaves out that one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from srv.args.config import argument_named
from srv.args.statement import UserStatement
from srv.errors import Rejection


def flag_of(name: str) -> str:
    """The flag of an argument's name."""
    return "--" + name.replace("_", "-")


def names_used(statements: Sequence[UserStatement]) -> Mapping[str, str]:
    """The alias by which the user set each argument, keyed by argument.

    Only the user's statement of the highest origin counts. Arguments that were set by their declared name are left out.
    """
    strongest: dict[str, UserStatement] = {}
    for statement in statements:
        if statement.argument not in strongest or statement.origin > strongest[statement.argument].origin:
            strongest[statement.argument] = statement
    return {name: spelled.name for name, spelled in strongest.items() if spelled.name in argument_named(name).names}


def reworded(rejected: Rejection, used: Mapping[str, str]) -> Rejection:
    """Replace flags and declared names in a refusal by the aliases in `used` (the result of `names_used`).

    Names of a single word are replaced only as flags, because they may be ordinary words of the text.
    """
    replacements = {flag_of(argument): flag_of(name) for argument, name in used.items()}
    replacements |= {argument: name for argument, name in used.items() if "_" in argument}
    if not replacements:
        return rejected
    longest_first = sorted(replacements, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?![\w-])")

    def reword(text: str) -> str:
        return pattern.sub(lambda match: replacements[match[0]], text)

    return replace(rejected, reason=reword(rejected.reason), remedy=reword(rejected.remedy))


EXCLUDED = "excluded"  # the code of constraints that say that another setting excludes a value


def without_excluded(violations: Sequence[Rejection]) -> list[Rejection]:
    """The rejections, without those that only say which other setting excludes a value that is unsupported anyway.

    Changing that other setting, as such a rejection advises, would not help.
    """
    unsupported = {violation.what for violation in violations if violation.code == "unsupported"}
    return [violation for violation in violations if violation.code != EXCLUDED or violation.what not in unsupported]
