"""The arguments reference, from the declarations alone: what core implements, whatever the platform."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from srv.args.config import ARGUMENTS, DEPRECATED
from srv.args.spec import Argument
from srv_matrix.argument_page import options
from srv_matrix.marks import escape, text_of


def arguments() -> str:
    """One section per group: a table of what is implemented, then what is planned."""
    groups = dict.fromkeys(each.group for each in ARGUMENTS.values())
    lines: list[str] = []
    for group in groups:
        members = [each for each in ARGUMENTS.values() if each.group == group]
        lines += [f"## {group.replace('_', ' ').capitalize()}", ""]
        if ready := [each for each in members if each.status == "implemented"]:
            lines += _table(ready)
        if planned := [each for each in members if each.status == "planned"]:
            lines += [f"<details><summary>Planned, and refused so far: {len(planned)}</summary>", ""]
            lines += [*_table(planned), "</details>", ""]
    lines += ["## Deprecated", "", "| Argument | Use instead |", "| --- | --- |"]
    lines += [f"| `{each.flag}` | `{each.replaced_by}` |" for each in DEPRECATED.values()]
    return text_of(lines)


def _table(members: Sequence[Argument]) -> Iterator[str]:
    yield "| Argument | Default | Values | Description |"
    yield "| --- | --- | --- | --- |"
    for each in members:
        default = "" if each.default is None else f"`{each.show(each.default)}`"
        flags = "<br>".join(f"`{flag}`" for flag in each.flags)
        yield f"| {flags} | {default} | {escape(options(each))} | {_about(each)} |"
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
