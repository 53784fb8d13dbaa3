"""`srv args translate`: command lines of other engines, said with arguments of `srv`.

It prints and finds devices; what a foreign flag means is for `srv.args.dialects` to say.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from srv.errors import Refusal, Rejected

if TYPE_CHECKING:
    from srv.args.dialects import Dialect, Row, Translation

FORMATS = ("all", "command", "yaml", "json")


def add_translate(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `translate` to the subcommands of `srv args`."""
    parser = subparsers.add_parser(
        "translate",
        help="say another engine's command line with arguments of srv",
        description="Translate a command line of another engine: srv args translate --from rtp-llm -- FLAG ..."
        " Exit status 2 if something of it is refused.",
    )
    parser.add_argument("--from", dest="dialect", metavar="ENGINE", required=True, help="rtp-llm, vllm or sglang")
    parser.add_argument("--device", metavar="NAME[:PROFILE]", help="device whose memory turns bytes into fractions")
    parser.add_argument("--format", choices=FORMATS, default="all", help="what to print (default: all)")
    parser.add_argument("--counts", action="store_true", help="print how many flags are mapped, converted, refused")
    parser.add_argument("--table", action="store_true", help="print what becomes of each flag")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- FLAG ...", help="the command line to translate")
    parser.set_defaults(handler=run, takes_server_arguments=True)  # so that flags without `--` come to `run`


def run(namespace: argparse.Namespace) -> int:
    """Print counts, the table, or a translation; 2 if something of the command line is refused."""
    from srv.args.dialects import read_dialect, translate

    if unknown := getattr(namespace, "unknown", None):
        reason, remedy = "it is no flag of `srv args translate`", "Write -- before the command line to translate."
        raise Refusal([Rejected("unknown_flag", unknown[0], None, "command line", reason, remedy)])
    if namespace.counts or namespace.table:
        dialect = read_dialect(namespace.dialect)
        as_json = namespace.format == "json"
        if namespace.table:
            print(json.dumps(table_dict(dialect), indent=2) if as_json else table_text(dialect))
        if namespace.counts:
            print(json.dumps(counts_dict(dialect), indent=2) if as_json else counts_text(dialect))
        return 0
    words = namespace.words[1:] if namespace.words[:1] == ["--"] else namespace.words
    translation = translate(namespace.dialect, words, lambda device: _memory(device or namespace.device))
    translation = replace(translation, rejections=(*translation.rejections, *bad_values(translation)))
    print(to_text(translation, namespace.format))
    if translation.rejections and namespace.format != "json":
        raise Refusal(translation.rejections)
    return 2 if translation.rejections else 0


def bad_values(translation: Translation) -> list[Rejected]:
    """Refusals of values that no launch would take; whether the rest fits a device and a model is for `srv plan`."""
    from srv.args.command_line import bad_value, read_translation
    from srv.args.config import ARGUMENTS

    statements, refused = read_translation(replace(translation, rejections=()))
    judged = ((each, ARGUMENTS[each.argument]) for each in statements)
    against = [
        bad_value(argument, argument.show(each.value), each.source, f"it {why}")
        for each, argument in judged
        if (why := argument.against(each.value)) is not None
    ]
    return [*refused, *against]


def _memory(device: str | None) -> int | None:
    """Bytes of a device that is named; a machine that nobody named is not asked, it may not be the one meant."""
    from srv.cli.plan import find_target

    return None if device is None else find_target(device).device.memory_bytes


def to_text(translation: Translation, form: str) -> str:
    """A translation in one of `FORMATS`; refusals are in JSON alone, elsewhere they are the caller's to print."""
    if form == "command":
        return translation.command
    if form == "yaml":
        return _yaml(translation).rstrip()
    if form == "json":
        from dataclasses import asdict

        return json.dumps(
            {
                "accepted": not translation.rejections,
                "words": translation.words,
                "values": translation.values,
                "notes": translation.notes,
                "refusals": [asdict(each) for each in translation.rejections],
            },
            indent=2,
        )
    lines = ["command line", f"  {translation.command}", "", "as YAML, for --config"]
    lines += [f"  {line}" for line in _yaml(translation).splitlines()]
    if translation.notes:
        lines += ["", "notes", *(f"  - {note}" for note in translation.notes)]
    return "\n".join(lines)


def _yaml(translation: Translation) -> str:
    import shlex

    import yaml

    text = yaml.safe_dump(translation.values, sort_keys=False, allow_unicode=True, width=1000)
    return text + (f"# not in it: {shlex.join(translation.passed)!a}\n" if translation.passed else "")


def counts_dict(dialect: Dialect) -> dict[str, Any]:
    """How many flags have each status: of the engine's page of arguments, and others that its code knows."""
    page, further = dialect.counts(), dialect.counts(of_page=False)
    unknown = {"unknown": 0}  # every row has one of the statuses, or the table would not have been read
    return {"dialect": dialect.name, "page": {**page, **unknown}, "further": dict(further)}


def counts_text(dialect: Dialect) -> str:
    """The counts for a reader."""
    counts = counts_dict(dialect)
    total = sum(counts["page"].values())
    told = ", ".join(f"{count} {status}" for status, count in counts["page"].items())
    lines = [f"{dialect.engine}: {total} rows: {told}"]
    if beyond := sum(counts["further"].values()):
        told = ", ".join(f"{count} {status}" for status, count in counts["further"].items())
        lines.append(f"{beyond} flags that its page of arguments does not list: {told}")
    if dialect.ours:
        lines.append("All its other flags are arguments of srv (`srv args list`).")
    return "\n".join(lines)


def table_dict(dialect: Dialect) -> list[dict[str, Any]]:
    """Every row: flags, status, the arguments that carry its meaning, or why none does and what to do."""
    return [
        {
            "flags": row.flags,
            "status": row.status,
            "arguments": row.targets,
            "conversion": row.conversion,
            "reason": row.refused,
            "remedy": row.remedy,
            "note": row.note,
            "page_rows": row.page_rows,
        }
        for row in dialect.rows
    ]


def table_text(dialect: Dialect) -> str:
    """Every row for a reader, a line each."""
    width = max(len(", ".join(row.flags)) for row in dialect.rows)
    return "\n".join(f"{', '.join(row.flags):{width}}  {row.status:9}  {_becomes(row)}" for row in dialect.rows)


def _becomes(row: Row) -> str:
    if row.refused:
        return f"{row.refused}. {row.remedy}"
    return ", ".join("--" + name.replace("_", "-") for name in row.targets) or row.note or "nothing needs to be said"
