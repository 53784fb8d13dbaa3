"""Telling about arguments: one in full, or all of them in a list. Makes text and JSON values; prints nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from srv.args.cli import metavar
from srv.args.config import ARGUMENTS, all_names, find_argument
from srv.args.spec import HIDDEN, Argument, nearest
from srv.errors import Refusal, Rejected


def find(spelling: str) -> Argument:
    """The argument of a name, alias or flag; Refusal with the nearest name if there is none."""
    argument = find_argument(spelling)
    if argument is None:
        near = nearest(spelling.lstrip("-").replace("-", "_").lower(), all_names())
        remedy = f"Did you mean {near}?" if near else "`srv args list` shows all arguments."
        raise Refusal(
            [Rejected("unknown_argument", repr(spelling), None, "command line", "there is no such argument", remedy)]
        )
    return argument


def explain(argument: Argument) -> str:
    """The declaration in words."""
    kind = argument.kind
    rows = [
        ("flag", ", ".join(argument.flags) + ("" if kind.base is bool else f" {metavar(argument)}")),
        ("environment", argument.variable),
        ("config file", argument.name),
        ("type", kind.name + (f", {argument.wants}" if argument.wants and not argument.choices else "")),
        ("unit", argument.arg.unit or ""),
        ("default", argument.show(argument.default)),
        ("backends", f"of the family {argument.arg.family}; `srv plan` lists them" if argument.arg.family else ""),
        ("needs", argument.arg.needs or ""),
        ("planned", argument.arg.planned or ""),
    ]
    lines = [f"{argument.name} ({argument.group})", f"  {argument.arg.help}", ""]
    lines += [f"  {label:<12} {text}" for label, text in rows if text]
    return "\n".join(lines)


def to_dict(argument: Argument) -> dict[str, Any]:
    """The declaration as JSON can hold it."""
    return {
        "name": argument.name,
        "group": argument.group,
        "help": argument.arg.help,
        "flags": list(argument.flags),
        "environment": argument.variable,
        "type": argument.kind.base.__name__.lower(),
        "optional": argument.kind.optional,
        "list": argument.kind.many,
        "choices": list(argument.choices),
        "check": argument.arg.check.wants if argument.arg.check else None,
        "unit": argument.arg.unit,
        "default": HIDDEN if argument.arg.secret and argument.default else argument.kind.dump(argument.default),
        "family": argument.arg.family,
        "needs": argument.arg.needs,
        "planned": argument.arg.planned,
        "secret": argument.arg.secret,
    }


def listing(arguments: Iterable[Argument] = ARGUMENTS.values()) -> str:
    """All arguments, a line each, under their groups."""
    arguments = tuple(arguments)
    width = max(len(argument.name) for argument in arguments)
    lines: list[str] = []
    group = None
    for argument in arguments:
        if argument.group != group:
            group = argument.group
            lines += [*([""] if lines else []), group]
        planned = " [planned]" if argument.arg.planned else ""
        lines.append(f"  {argument.name:<{width}}  {argument.show(argument.default):<10}  {argument.arg.help}{planned}")
    return "\n".join(lines)
