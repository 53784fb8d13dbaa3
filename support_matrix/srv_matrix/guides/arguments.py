"""The arguments reference, from the declarations alone: what core implements, whatever the platform."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from srv.args.config import ARGUMENTS, DEPRECATED
from srv.args.spec import Argument
from srv_matrix.argument_page import options
from srv_matrix.marks import escape, text_of


def arguments() -> str:
    """One section per group: a table of what is implemented, then what is planned."""
    groups = dict.fromkeys(argument.group for argument in ARGUMENTS.values())
    lines: list[str] = []
    for group in groups:
        members = [argument for argument in ARGUMENTS.values() if argument.group == group]
        lines += [f"## {group.replace('_', ' ').capitalize()}", ""]
        if ready := [member for member in members if member.status == "implemented"]:
            lines += _table(ready)
        if planned := [member for member in members if member.status == "planned"]:
            lines += [f"<details><summary>Planned, and refused so far: {len(planned)}</summary>", ""]
            lines += [*_table(planned), "</details>", ""]
    lines += ["## Deprecated", "", "| Argument | Use instead |", "| --- | --- |"]
    lines += [f"| `{alias.flag}` | `{alias.replaced_by}` |" for alias in DEPRECATED.values()]
    return text_of(lines)


def _table(members: Sequence[Argument]) -> Iterator[str]:
    yield "| Argument | Default | Values | Description |"
    yield "| --- | --- | --- | --- |"
    for member in members:
        default = "" if member.default is None else f"`{member.show(member.default)}`"
        flags = "<br>".join(f"`{flag}`" for flag in member.flags)
        yield f"| {flags} | {default} | {escape(options(member))} | {_about(member)} |"
    yield ""


def _about(argument: Argument) -> str:
    sentences = [argument.arg.help]
    if argument.arg.planned_values:
        sentences.append(f"Planned: {', '.join(value for value, _ in argument.arg.planned_values)}.")
    if argument.arg.only_with:
        needed = " or ".join("`--" + name.replace("_", "-") + "`" for name in argument.arg.only_with)
        sentences.append(f"Only with {needed}.")
    if argument.arg.planned:
        sentences.append(f"Planned: {argument.arg.planned}.")
    return escape(" ".join(sentences))
