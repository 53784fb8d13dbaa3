"""Gather the user's input from the command line, the environment and the configuration file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from srv.args.command_line import (
    bad_value,
    read_command_line,
    read_config,
    read_text,
    read_translation,
    unknown_flags,
)
from srv.args.config import all_arguments, all_names, find_any_argument
from srv.args.deprecated import translate
from srv.args.spec import Argument, nearest
from srv.args.statement import Origin, UserInput, UserStatement
from srv.errors import Rejection

_PREFIX = "SRV_"


def gather(namespace: argparse.Namespace, environment: Mapping[str, str]) -> UserInput:
    """Everything that the user set, from a namespace of `add_arguments` and the environment variables of the process.

    The namespace may hold `unknown` (arguments that argparse did not recognise), `config` (a file) and `translation`
    (a translated command line of another engine). Rejections are collected in the result; `resolve` raises them
    together with its own.
    """
    statements, rejections = read_command_line(namespace)
    rejections += unknown_flags(getattr(namespace, "unknown", ()))
    translation_notes: list[str] = []
    if (translation := getattr(namespace, "translation", None)) is not None:
        more, rejected = read_translation(translation)
        statements, rejections = statements + more, rejections + rejected
        translation_notes = list(translation.notes)
    more, rejected = read_environment(environment)
    statements, rejections = statements + more, rejections + rejected
    config, rejected = read_config(namespace)
    rejections += rejected
    if config is not None:
        from srv.args.yaml import read_file  # importing the YAML parser takes time, so it waits until there is a file

        more, rejected = read_file(Path(config))
        statements, rejections = statements + more, rejections + rejected
    statements, contradictions, notes = translate(statements)
    return UserInput(
        tuple(statements),
        (*rejections, *contradictions),
        (*translation_notes, *notes, *misspelt_variables(environment)),
    )


def gather_keywords(keywords: Mapping[str, object], environment: Mapping[str, str], caller: str) -> UserInput:
    """What a Python caller set: keyword arguments (typed values, as in YAML), and the environment variables.

    `caller` names the callable in messages: "LLM" gives the source "LLM(page_size=...)". A keyword that is None counts
    as unset. Rejections are collected as in `gather`.
    """
    statements: list[UserStatement] = []
    rejections: list[Rejection] = []
    for name, value in keywords.items():
        if value is None:
            continue
        read = _read_keyword(name, value, f"{caller}({name}=...)")
        if isinstance(read, Rejection):
            rejections.append(read)
        else:
            statements.append(read)
    more, rejected = read_environment(environment)
    statements, contradictions, notes = translate(statements + more)
    return UserInput(
        tuple(statements), (*rejections, *rejected, *contradictions), (*notes, *misspelt_variables(environment))
    )


def _read_keyword(name: str, value: object, source: str) -> UserStatement | Rejection:
    argument = find_any_argument(name)
    if argument is None:
        closest = nearest(name, all_names())
        remedy = f"Did you mean {closest}?" if closest else "`srv args list` shows all arguments."
        return Rejection("unknown_key", name, None, source, "there is no such argument", remedy)
    try:
        typed = argument.read(os.fspath(value) if isinstance(value, os.PathLike) else value)
    except ValueError as error:
        return bad_value(argument, value, source, f"it {error}")
    return UserStatement(argument.name, typed, Origin.COMMAND_LINE, source, "" if name == argument.name else name)


def is_secret(variable: str) -> bool:
    """Whether an environment variable sets an argument whose value is never printed."""
    argument = _argument_of_variable(variable)
    return argument is not None and argument.arg.secret


def _argument_of_variable(variable: str) -> Argument | None:
    """The argument that an environment variable sets, by any of its names."""
    name = variable.removeprefix(_PREFIX)
    return find_any_argument(name.lower()) if variable.startswith(_PREFIX) and name.isupper() else None


def read_environment(environment: Mapping[str, str]) -> tuple[list[UserStatement], list[Rejection]]:
    """Read the `SRV_<NAME>` variables; invalid values become rejections. A variable set to "" counts as unset."""
    statements: list[UserStatement] = []
    rejections: list[Rejection] = []
    for variable in sorted(environment):
        argument, text = _argument_of_variable(variable), environment[variable]
        if argument is None or not text:
            continue
        name = variable.removeprefix(_PREFIX).lower()
        read = read_text(argument, text, Origin.ENVIRONMENT, f"environment {variable}", name)
        if isinstance(read, Rejection):
            rejections.append(read)
        else:
            statements.append(read)
    return statements, rejections


def misspelt_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """A note for each variable whose name is similar to one of ours. Other variables may begin with SRV_ as well."""
    variables = [argument.variable for argument in all_arguments().values()]
    notes: list[str] = []
    for variable in sorted(environment):
        if not variable.startswith(_PREFIX) or _argument_of_variable(variable) is not None:
            continue
        closest = nearest(variable, variables, cutoff=0.85)
        if closest:
            notes.append(f"environment {variable} sets no argument and is ignored; did you mean {closest}?")
    return tuple(notes)
