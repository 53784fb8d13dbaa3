"""Descriptions of arguments for `srv args`: one in full, or a list of all. Returns text or JSON; prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from srv.args.cli import metavar
from srv.args.config import SPELLINGS, all_names, find_any_argument, normalize_name
from srv.args.spec import HIDDEN, Argument, nearest
from srv.errors import Refusal, Rejection


def find(spelling: str) -> Argument:
    """The argument (or deprecated switch) of a name, alias or flag; Refusal with the most similar name if none."""
    argument = find_any_argument(spelling)
    if argument is None and normalize_name(spelling.lower()) == "config":
        reason = "it is a flag of the command line that names the YAML file of arguments; it is not an argument itself"
        remedy = "Pass --config FILE; `srv args schema` describes the file."
        raise Refusal([Rejection("unknown_argument", repr(spelling), None, "command line", reason, remedy)])
    if argument is None:
        closest = nearest(normalize_name(spelling.lower()), all_names())
        remedy = f"Did you mean {closest}?" if closest else "`srv args list` shows all arguments."
        raise Refusal(
            [Rejection("unknown_argument", repr(spelling), None, "command line", "there is no such argument", remedy)]
        )
    return argument


def explain(argument: Argument) -> str:
    """The full description of an argument, as text."""
    kind = argument.kind
    rows = [
        ("flag", ", ".join(argument.flags) + ("" if kind.base is bool else f" {metavar(argument)}")),
        ("environment", argument.variable),
        ("config file", argument.name),
        ("type", kind.name + (f", {argument.expected}" if argument.expected and not argument.choices else "")),
        ("unit", argument.arg.unit or ""),
        ("default", argument.show(argument.default)),
        ("backends", f"family {argument.arg.family}; `srv plan` lists them" if argument.arg.family else ""),
        ("needs", argument.arg.needs or ""),
        ("only with", " or ".join(argument.arg.only_with)),
        ("planned", argument.arg.planned or ""),
        *((f"not yet: {value}", reason) for value, reason in argument.arg.planned_values),
        ("deprecated", argument.deprecated or ""),
    ]
    lines = [f"{argument.name} ({argument.group})", f"  {argument.arg.help}", ""]
    width = max(12, *(len(label) + 1 for label, text in rows if text))
    lines += [f"  {label:<{width}} {text}" for label, text in rows if text]
    return "\n".join(lines)


def to_dict(argument: Argument) -> dict[str, Any]:
    """The declaration as JSON-compatible values."""
    return {
        "name": argument.name,
        "group": argument.group,
        "help": argument.arg.help,
        "status": argument.status,
        "flags": list(argument.flags),
        "old_names": list(argument.old_names),
        "environment": argument.variable,
        "type": argument.kind.base.__name__.lower(),
        "optional": argument.kind.optional,
        "list": argument.kind.many,
        "choices": list(argument.choices),
        "check": argument.arg.check.expected if argument.arg.check else None,
        "unit": argument.arg.unit,
        "default": HIDDEN if argument.arg.secret and argument.default else argument.kind.dump(argument.default),
        "family": argument.arg.family,
        "needs": argument.arg.needs,
        "only_with": list(argument.arg.only_with),
        "planned": argument.arg.planned,
        "planned_values": dict(argument.arg.planned_values),
        "published_values": list(SPELLINGS.published.get(argument.name, ())),
        "deprecated": argument.deprecated,
        "replaced_by": str(argument.replaced_by) if argument.replaced_by else None,
        "secret": argument.arg.secret,
    }


def core_status(argument: Argument) -> str:
    """The status of an argument in core, whatever the platform."""
    return argument.status


def listing(arguments: Iterable[Argument], status: Callable[[Argument], str] = core_status) -> str:
    """A list of arguments, one per line, under their groups; "" if there are none.

    `status(argument)` is printed in brackets, unless it is "implemented".
    """
    arguments = tuple(arguments)
    width = max((len(argument.name) for argument in arguments), default=0)
    lines: list[str] = []
    group = None
    for argument in arguments:
        if argument.group != group:
            group = argument.group
            lines += [*([""] if lines else []), group]
        shown = status(argument)
        suffix = "" if shown == "implemented" else f" [{shown}]"
        lines.append(f"  {argument.name:<{width}}  {argument.show(argument.default):<10}  {argument.arg.help}{suffix}")
    return "\n".join(lines)
