"""`srv args translate`: translate command lines of other engines to arguments of `srv`.

Prints translations, and finds devices for the conversion of sizes. `srv.args.dialects` translates the flags.
`srv.planning.translated` says which of the translated arguments a launch would refuse.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from srv.errors import Refusal, Rejection

if TYPE_CHECKING:
    from srv.args.dialects import Dialect, DialectRow, Translation

FORMATS = ("all", "command", "yaml", "json")


def add_translate(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `translate` to the subcommands of `srv args`."""
    parser = subparsers.add_parser(
        "translate",
        help="translate another engine's command line",
        description="Translate a command line of another engine: srv args translate --from rtp-llm -- FLAG ..."
        " Exit status 2 if any flag cannot be translated, or if a launch would refuse it.",
    )
    parser.add_argument("--from", dest="dialect", metavar="ENGINE", required=True, help="rtp-llm, vllm or sglang")
    parser.add_argument(
        "--device",
        metavar="NAME[:PROFILE]",
        help="device to check the result for; its memory converts bytes to fractions",
    )
    parser.add_argument("--format", choices=FORMATS, default="all", help="what to print (default: all)")
    parser.add_argument("--counts", action="store_true", help="print how many flags are mapped, converted and refused")
    parser.add_argument("--table", action="store_true", help="print the translation of each flag")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- FLAG ...", help="the command line to translate")
    parser.set_defaults(handler=run, takes_server_arguments=True)  # so that `run` receives flags without `--`


def run(namespace: argparse.Namespace) -> int:
    """Print counts, the table, or a translation; exit status 2 if any flag is refused."""
    from srv.args.dialects import read_dialect, translate
    from srv.planning.translated import bad_values, launch_verdict

    if unknown := getattr(namespace, "unknown", None):
        reason, remedy = "it is not a flag of `srv args translate`", "Write -- before the command line to translate."
        raise Refusal([Rejection("unknown_flag", unknown[0], None, "command line", reason, remedy)])
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
    verdict = launch_verdict(translation, namespace.device)
    rejections = (*translation.rejections, *bad_values(translation), *verdict.refusals)
    notes = translation.notes if rejections else (*translation.notes, *verdict.unchecked)
    translation = replace(translation, rejections=tuple(dict.fromkeys(rejections)), notes=notes)
    print(to_text(translation, namespace.format))
    if translation.rejections and namespace.format != "json":
        raise Refusal(translation.rejections)
    return 2 if translation.rejections else 0


def _memory(device: str | None) -> int | None:
    """The memory of the named device in bytes; None without a name, because this machine may not be the target."""
    from srv.planning.target import find_target

    return None if device is None else find_target(device).device.memory_bytes


def to_text(translation: Translation, output_format: str) -> str:
    """A translation in one of `FORMATS`. Only JSON includes the refusals; otherwise the caller prints them."""
    if output_format == "command":
        return translation.command
    if output_format == "yaml":
        return _yaml(translation).rstrip()
    if output_format == "json":
        from dataclasses import asdict

        return json.dumps(
            {
                "accepted": not translation.rejections,
                "words": translation.words,
                "values": translation.values,
                "notes": translation.notes,
                "refusals": [asdict(rejection) for rejection in translation.rejections],
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
    return text + (f"# not included: {shlex.join(translation.passthrough)!a}\n" if translation.passthrough else "")


def counts_dict(dialect: Dialect) -> dict[str, Any]:
    """Counts of flags by status: those on the engine's page of arguments, and further ones that only its code has."""
    page, further = dialect.counts(), dialect.counts(of_page=False)
    unknown = {"unknown": 0}  # reading the table fails if a row has no status
    return {"dialect": dialect.name, "page": {**page, **unknown}, "further": dict(further)}


def counts_text(dialect: Dialect) -> str:
    """The counts as text."""
    counts = counts_dict(dialect)
    total = sum(counts["page"].values())
    summary = ", ".join(f"{count} {status}" for status, count in counts["page"].items())
    lines = [f"{dialect.engine}: {total} rows: {summary}"]
    if beyond := sum(counts["further"].values()):
        summary = ", ".join(f"{count} {status}" for status, count in counts["further"].items())
        lines.append(f"{beyond} flags that its page of arguments does not list: {summary}")
    if dialect.ours:
        lines.append("All its other flags are arguments of srv (`srv args list`).")
    return "\n".join(lines)


def table_dict(dialect: Dialect) -> list[dict[str, Any]]:
    """Every row: its flags, its status, and the equivalent arguments, or the reason why there are none and a remedy."""
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
    """Every row as text, one per line."""
    width = max(len(", ".join(row.flags)) for row in dialect.rows)
    return "\n".join(f"{', '.join(row.flags):{width}}  {row.status:9}  {_equivalent(row)}" for row in dialect.rows)


def _equivalent(row: DialectRow) -> str:
    if row.refused:
        return f"{row.refused}. {row.remedy}"
    return ", ".join("--" + name.replace("_", "-") for name in row.targets) or row.note or "no setting is needed"
