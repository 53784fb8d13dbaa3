"""Gathering what the user said: command line, environment, configuration file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from srv.args.command_line import read_command_line, read_config, read_text, read_translation, unknown_flags
from srv.args.config import ARGUMENTS, find_any
from srv.args.deprecated import translate
from srv.args.spec import Argument, nearest
from srv.args.statement import Origin, UserInput, UserStatement
from srv.errors import Rejected

_PREFIX = "SRV_"


def gather(namespace: argparse.Namespace, environment: Mapping[str, str]) -> UserInput:
    """Everything the user said, by a namespace of `add_arguments` and the process's environment.

    The namespace may hold `unknown` (words that no flag took), `config` (a file) and `translation` (what words of
    another engine come to). Refusals are collected in the result, for `resolve` to raise together with its own.
    """
    statements, rejections = read_command_line(namespace)
    rejections += unknown_flags(getattr(namespace, "unknown", ()))
    told: list[str] = []
    if (translation := getattr(namespace, "translation", None)) is not None:
        more, refused = read_translation(translation)
        statements, rejections, told = statements + more, rejections + refused, list(translation.notes)
    more, refused = read_environment(environment)
    statements, rejections = statements + more, rejections + refused
    config, refused = read_config(namespace)
    rejections += refused
    if config is not None:
        from srv.args.yaml import read_file  # only who has a file waits for a YAML parser

        more, refused = read_file(Path(config))
        statements, rejections = statements + more, rejections + refused
    statements, contradictions, notes = translate(statements)
    return UserInput(
        tuple(statements), (*rejections, *contradictions), (*told, *notes, *misspelt_variables(environment))
    )


def _of_variable(variable: str) -> Argument | None:
    """The argument that a variable sets, by any of its names."""
    name = variable.removeprefix(_PREFIX)
    return find_any(name.lower()) if variable.startswith(_PREFIX) and name.isupper() else None


def read_environment(environment: Mapping[str, str]) -> tuple[list[UserStatement], list[Rejected]]:
    """What `SRV_<NAME>` variables say, and what of it cannot be read. A variable set to "" counts as unset."""
    statements: list[UserStatement] = []
    rejections: list[Rejected] = []
    for variable in sorted(environment):
        argument, text = _of_variable(variable), environment[variable]
        if argument is None or not text:
            continue
        name = variable.removeprefix(_PREFIX).lower()
        read = read_text(argument, text, Origin.ENVIRONMENT, f"environment {variable}", name)
        if isinstance(read, Rejected):
            rejections.append(read)
        else:
            statements.append(read)
    return statements, rejections


def misspelt_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """A note for each variable that is nearly one of ours. Others may well begin with SRV_ and are left alone."""
    known = [argument.variable for argument in ARGUMENTS.values()]
    notes: list[str] = []
    for variable in sorted(environment):
        if not variable.startswith(_PREFIX) or _of_variable(variable) is not None:
            continue
        near = nearest(variable, known, cutoff=0.85)
        if near:
            notes.append(f"environment {variable} sets no argument and is ignored; did you mean {near}?")
    return tuple(notes)
