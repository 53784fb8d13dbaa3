"""Words that still work but are no longer the ones to use: deprecated switches, former names.

Turns statements made in them into statements about today's arguments, each with a note; refuses a user who says
two different things of one argument in one place. Knows nothing of how statements are read or resolved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from srv.args.config import ARGUMENTS, DEPRECATED
from srv.args.spec import Argument
from srv.args.statement import UserStatement
from srv.args.wording import flag_of
from srv.errors import Rejected


def translate(
    statements: Sequence[UserStatement],
) -> tuple[list[UserStatement], list[Rejected], list[str]]:
    """The statements in today's words, refusals of contradictions among them, and a note for each outdated word."""
    translated: list[UserStatement] = []
    notes: list[str] = []
    for said in statements:
        if said.argument in DEPRECATED:
            switch = DEPRECATED[said.argument]
            notes.append(f"{said.source}: {switch.flag} is deprecated; {switch.deprecated}")
            if said.value:
                translated.append(_today(said, switch, statements))
            continue
        if said.name in ARGUMENTS[said.argument].old_names:
            notes.append(f"{said.source}: {flag_of(said.name)} is now called {ARGUMENTS[said.argument].flag}")
        translated.append(said)
    return translated, _contradictions(translated), notes


def _today(said: UserStatement, switch: Argument, statements: Sequence[UserStatement]) -> UserStatement:
    replacement = switch.replaced_by
    assert replacement is not None  # what is in DEPRECATED has one
    if replacement.same_as:
        value = _value_of(replacement.same_as, statements)
    else:
        value = ARGUMENTS[replacement.argument].parse(replacement.value)
    source = f"{said.source} with {switch.flag}"
    return said._replace(argument=replacement.argument, value=value, source=source, name=switch.name)


def _value_of(name: str, statements: Sequence[UserStatement]) -> Any:
    """What the user says of an argument in the strongest place, else its declared default."""
    found = max((said for said in statements if said.argument == name), key=lambda said: said.origin, default=None)
    return found.value if found else ARGUMENTS[name].default


def _contradictions(statements: Sequence[UserStatement]) -> list[Rejected]:
    """A refusal for each argument of which one place says two things; the same thing said twice is none."""
    first: dict[tuple[str, int], UserStatement] = {}
    rejections: list[Rejected] = []
    for said in statements:
        other = first.setdefault((said.argument, said.origin), said)
        if other.value != said.value:
            argument = ARGUMENTS[said.argument]
            reason = f"{_told(other)} says {argument.show(other.value)}"
            value, remedy = argument.show(said.value), "Say one of the two."
            rejections.append(Rejected("contradiction", said.argument, value, _told(said), reason, remedy))
    return rejections


def _told(said: UserStatement) -> str:
    """Where he said it, with the flag unless that place names one already."""
    return said.source if "--" in said.source else f"{said.source} with {flag_of(said.name or said.argument)}"
