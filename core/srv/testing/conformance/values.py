"""Values to try for an argument: every choice, both booleans, numbers at and next to each boundary. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from srv.args.command_line import read_text
from srv.args.config import ARGUMENTS
from srv.args.spec import Argument
from srv.args.statement import Origin, UserInput, UserStatement
from srv.platform.facts import BackendSpec
from srv.platform.manifest import Manifest

SOURCE = "the conformance kit"
_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const")
_INTEGERS = ("1", "2", "16", "64", "128")
_FRACTIONS = ("0.25", "0.5", "1.0")


def implemented() -> tuple[Argument, ...]:
    """The arguments that core implements."""
    return tuple(argument for argument in ARGUMENTS.values() if argument.status == "implemented")


def candidate_statements(argument: Argument, manifest: Manifest) -> tuple[UserStatement, ...]:
    """What a user could set an argument to: values of the right type that its declaration accepts."""
    read = (read_text(argument, text, Origin.COMMAND_LINE, SOURCE) for text in candidate_texts(argument, manifest))
    statements = (candidate for candidate in read if isinstance(candidate, UserStatement))
    return tuple(statement for statement in statements if argument.validation_error(statement.value) is None)


def candidate_texts(argument: Argument, manifest: Manifest) -> tuple[str, ...]:
    """The values to try, as strings; () for free text."""
    if argument.kind.base is bool:
        return ("true", "false")
    if argument.arg.family:
        specs: Sequence[BackendSpec] = manifest.facts.backends.get(argument.arg.family, ())
        return tuple(spec.name for spec in specs)
    if argument.choices:
        return argument.choices
    if argument.kind.many or argument.kind.base not in (int, float):
        return ()
    return tuple(dict.fromkeys((*_boundaries(argument), *(_INTEGERS if argument.kind.base is int else _FRACTIONS))))


def user_input(*statements: UserStatement) -> UserInput:
    """The input of resolution."""
    return UserInput(statements)


def user_statement(name: str, value: Any) -> UserStatement:
    """A value of an argument, as if from a command line."""
    return UserStatement(name, value, Origin.COMMAND_LINE, SOURCE)


def _boundaries(argument: Argument) -> Iterator[str]:
    """The limits in the argument's schema, and the nearest values on either side of each."""
    schema = dict(argument.arg.check.schema) if argument.arg.check else {}
    schemas = [schema, *schema.get("anyOf", ())]
    limits = [part[keyword] for part in schemas for keyword in _KEYWORDS if keyword in part]
    step = 1 if argument.kind.base is int else 1e-6
    for value in (*limits, *schema.get("enum", ())):
        yield from (f"{value + by:.9g}" for by in (-step, 0, step))
