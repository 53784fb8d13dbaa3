"""Gathering what the user said: command line, environment, configuration file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from srv.args.cli import read_command_line, read_text, unknown_flags
from srv.args.config import ARGUMENTS
from srv.args.spec import nearest
from srv.args.statement import Origin, UserInput, UserStatement
from srv.args.yaml import read_file
from srv.errors import Rejected


def gather(namespace: argparse.Namespace, environment: Mapping[str, str]) -> UserInput:
    """Everything the user said, by a namespace of `add_arguments` and the process's environment.

    Refusals are collected in the result, for `resolve` to raise together with its own.
    """
    statements, rejections = read_command_line(namespace)
    rejections += unknown_flags(getattr(namespace, "unknown", ()))
    more, refused = read_environment(environment)
    statements, rejections = statements + more, rejections + refused
    if (config := getattr(namespace, "config", None)) is not None:
        more, refused = read_file(Path(config))
        statements, rejections = statements + more, rejections + refused
    return UserInput(tuple(statements), tuple(rejections), misspelt_variables(environment))


def read_environment(environment: Mapping[str, str]) -> tuple[list[UserStatement], list[Rejected]]:
    """What `SRV_<NAME>` variables say, and what of it cannot be read. A variable set to "" counts as unset."""
    statements: list[UserStatement] = []
    rejections: list[Rejected] = []
    for argument in ARGUMENTS.values():
        text = environment.get(argument.variable)
        if not text:
            continue
        read = read_text(argument, text, Origin.ENVIRONMENT, f"environment {argument.variable}")
        if isinstance(read, Rejected):
            rejections.append(read)
        else:
            statements.append(read)
    return statements, rejections


def misspelt_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """A note for each variable that is nearly one of ours. Others may well begin with SRV_ and are left alone."""
    known = [argument.variable for argument in ARGUMENTS.values()]
    notes: list[str] = []
    for variable in sorted(environment.keys() - set(known)):
        near = nearest(variable, known, cutoff=0.85) if variable.startswith("SRV_") else None
        if near:
            notes.append(f"environment {variable} sets no argument and is ignored; did you mean {near}?")
    return tuple(notes)
