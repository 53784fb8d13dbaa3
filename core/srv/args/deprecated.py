"""Deprecated switches and former names of arguments, which still work.

Statements that use them are translated to the current arguments, each with a note. Two different values of one argument
in the same source are rejected. This module must not know how statements are read or resolved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from srv.args.config import ARGUMENTS, DEPRECATED, argument_named
from srv.args.spec import Argument
from srv.args.statement import UserStatement
from srv.args.wording import flag_of
from srv.errors import Rejection


def translate(
    statements: Sequence[UserStatement],
) -> tuple[list[UserStatement], list[Rejection], list[str]]:
    """Translate to current arguments; returns the statements, rejections of contradictions, and the notes."""
    translated: list[UserStatement] = []
    notes: list[str] = []
    for statement in statements:
        if statement.argument in DEPRECATED:
            switch = DEPRECATED[statement.argument]
            notes.append(f"{statement.source}: {switch.flag} is deprecated; {switch.deprecated}")
            if statement.value:
                translated.append(_replacement(statement, switch, statements))
            continue
        if statement.name in argument_named(statement.argument).old_names:
            current = ARGUMENTS[statement.argument].flag
            notes.append(f"{statement.source}: {flag_of(statement.name)} is now called {current}")
        translated.append(statement)
    return translated, _contradictions(translated), notes


def _replacement(statement: UserStatement, switch: Argument, statements: Sequence[UserStatement]) -> UserStatement:
    replacement = switch.replaced_by
    assert replacement is not None  # every switch in DEPRECATED has one
    if replacement.same_as:
        value = _value_of(replacement.same_as, statements)
    else:
        value = ARGUMENTS[replacement.argument].parse(replacement.value)
    source = f"{statement.source} with {switch.flag}"
    return statement._replace(argument=replacement.argument, value=value, source=source, name=switch.name)


def _value_of(name: str, statements: Sequence[UserStatement]) -> Any:
    """The user's value of the highest origin, or the declared default."""
    strongest = max(
        (statement for statement in statements if statement.argument == name),
        key=lambda statement: statement.origin,
        default=None,
    )
    return strongest.value if strongest else ARGUMENTS[name].default


def _contradictions(statements: Sequence[UserStatement]) -> list[Rejection]:
    """A rejection for each argument that has two different values in the same origin."""
    first: dict[tuple[str, int], UserStatement] = {}
    rejections: list[Rejection] = []
    for statement in statements:
        other = first.setdefault((statement.argument, statement.origin), statement)
        if other.value != statement.value:
            argument = argument_named(statement.argument)
            reason = f"{_source_with_flag(other)} sets it to {argument.show(other.value)}"
            value, remedy = argument.show(statement.value), "Keep one of the two."
            source = _source_with_flag(statement)
            rejections.append(Rejection("contradiction", statement.argument, value, source, reason, remedy))
    return rejections


def _source_with_flag(statement: UserStatement) -> str:
    """The source of a statement, with the flag unless the source names it already."""
    if "--" in statement.source:
        return statement.source
    return f"{statement.source} with {flag_of(statement.name or statement.argument)}"
