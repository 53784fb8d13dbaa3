"""Values worth trying for an argument: every choice, both booleans, numbers on and beside each boundary. Torch-free."""

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
_NUMBERS = ("1", "2", "16", "64", "128")
_FRACTIONS = ("0.25", "0.5", "1.0")


def implemented() -> tuple[Argument, ...]:
    """The arguments that core implements."""
    return tuple(argument for argument in ARGUMENTS.values() if argument.status == "implemented")


def statements(argument: Argument, manifest: Manifest) -> tuple[UserStatement, ...]:
    """What a user could say of an argument: values of the right type that its declaration takes."""
    read = (read_text(argument, text, Origin.COMMAND_LINE, SOURCE) for text in texts(argument, manifest))
    said = (each for each in read if isinstance(each, UserStatement))
    return tuple(each for each in said if argument.validation_error(each.value) is None)


def texts(argument: Argument, manifest: Manifest) -> tuple[str, ...]:
    """The same as texts; () for free text, of which nobody can know what is worth trying."""
    if argument.kind.base is bool:
        return ("true", "false")
    if argument.arg.family:
        specs: Sequence[BackendSpec] = manifest.facts.backends.get(argument.arg.family, ())
        return tuple(spec.name for spec in specs)
    if argument.choices:
        return argument.choices
    if argument.kind.many or argument.kind.base not in (int, float):
        return ()
    return tuple(dict.fromkeys((*_boundaries(argument), *(_NUMBERS if argument.kind.base is int else _FRACTIONS))))


def user_input(*said: UserStatement) -> UserInput:
    """What was said, as resolution takes it."""
    return UserInput(said)


def says(name: str, value: Any) -> UserStatement:
    """One value of one argument, as if from a command line."""
    return UserStatement(name, value, Origin.COMMAND_LINE, SOURCE)


def _boundaries(argument: Argument) -> Iterator[str]:
    """Numbers at which the argument's law, as its schema has it, may turn; and the nearest on either side."""
    schema = dict(argument.arg.check.schema) if argument.arg.check else {}
    laws = [schema, *schema.get("anyOf", ())]
    found = [law[keyword] for law in laws for keyword in _KEYWORDS if keyword in law]
    step = 1 if argument.kind.base is int else 1e-6
    for number in (*found, *schema.get("enum", ())):
        yield from (f"{number + by:.9g}" for by in (-step, 0, step))
