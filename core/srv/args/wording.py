"""Refusals in the words of the user, who may know an argument by another name than its own.

Whoever refuses a value, core or a plugin, names arguments by their own names and flags. Where the user set one of them
by an alias, reason and remedy name that instead, since it is the word that he will look for. `Rejected.what` stays the
argument's own name: programs read it. A deprecated switch is no such name, since it takes other values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from srv.args.config import ARGUMENTS
from srv.args.statement import UserStatement
from srv.errors import Rejected


def flag_of(name: str) -> str:
    """The flag of an argument's name."""
    return "--" + name.replace("_", "-")


def names_used(statements: Sequence[UserStatement]) -> Mapping[str, str]:
    """By argument the name that the user's strongest word on it uses, where that is not its own."""
    strongest: dict[str, UserStatement] = {}
    for said in statements:
        if said.argument not in strongest or said.origin > strongest[said.argument].origin:
            strongest[said.argument] = said
    return {argument: said.name for argument, said in strongest.items() if said.name in ARGUMENTS[argument].names}


def reworded(rejected: Rejected, used: Mapping[str, str]) -> Rejected:
    """The refusal with flags, and names of several words, as the user wrote them. `used`: as of `names_used`."""
    words = {flag_of(argument): flag_of(name) for argument, name in used.items()}
    words |= {argument: name for argument, name in used.items() if "_" in argument}
    if not words:
        return rejected
    longest_first = sorted(words, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?![\w-])")

    def turned(text: str) -> str:
        return pattern.sub(lambda found: words[found[0]], text)

    return replace(rejected, reason=turned(rejected.reason), remedy=turned(rejected.remedy))
