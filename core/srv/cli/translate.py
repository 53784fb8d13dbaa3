"""`srv args translate`: translate command lines of other engines to arguments of `srv`.

Prints translations, and finds devices for the conversion of sizes. `srv.args.dialects` translates the flags.
`srv.args.resolve`, which also refuses a launch, says which of the translated arguments a launch would refuse.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from srv.errors import Refusal, Rejection

if TYPE_CHECKING:
    from srv.args.dialects import Dialect, Row, Translation
    from srv.args.statement import UserInput
    from srv.models.options import ReadOptions
    from srv.planning.target import Target
    from srv.specs import ModelFacts

UNCHECKED_DEVICE = "a launch may refuse more: name the device with --device NAME:PROFILE to have its rules checked"
UNCHECKED_MODEL = "a launch may refuse more: the files of the model are not on this machine"
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


def bad_values(translation: Translation) -> list[Rejection]:
    """Refusals of invalid values."""
    from srv.args.command_line import bad_value, read_translation
    from srv.args.config import argument_named

    statements, refused = read_translation(replace(translation, rejections=()))
    with_arguments = ((each, argument_named(each.argument)) for each in statements)
    invalid = [
        bad_value(argument, argument.show(each.value), each.source, f"it {error}")
        for each, argument in with_arguments
        if (error := argument.validation_error(each.value)) is not None
    ]
    return [*refused, *invalid]


class Verdict(NamedTuple):
    """What a launch refuses, and what could not be asked."""

    refusals: list[Rejection]
    unchecked: list[str]


def launch_verdict(translation: Translation, device: str | None) -> Verdict:
    """Refusals of valid values, by the rules of a launch.

    The rules of a platform apply only if the command line or `device` names it with its profile (or it is available
    here), those about a model only if its files are on this machine: nothing is downloaded.
    """
    from srv.args.command_line import read_translation
    from srv.args.config import argument_named
    from srv.args.deprecated import translate
    from srv.args.statement import UserInput
    from srv.errors import ModelError, PlatformUnavailable
    from srv.planning.launchable import check_launch, check_model
    from srv.planning.resolution import argument_fault, model_fault, read_options, resolve_arguments

    statements, _ = read_translation(replace(translation, rejections=()))
    valid = [each for each in statements if argument_named(each.argument).validation_error(each.value) is None]
    given, contradictions, _ = translate(valid)
    user = UserInput(tuple(given))
    faults, target, model = list(contradictions), None, None
    try:
        target = _target(user, device)
    except Refusal as refusal:
        faults += refusal.rejections
    except PlatformUnavailable as error:
        faults.append(argument_fault(user, "device", error.code, error.reason, error.remedy))
    try:
        model = _local_model(user.value("model_path"), read_options(user))
    except ModelError as error:
        faults.append(model_fault(user, error))
    unchecked = [] if target is not None or faults else [UNCHECKED_DEVICE]
    unchecked += [] if model is not None or faults else [UNCHECKED_MODEL]
    try:
        resolved = resolve_arguments(user, target, model)
    except Refusal as refusal:
        return Verdict([*faults, *refusal.rejections], unchecked)
    if model is not None:
        found = check_model(model, resolved) if target is None else check_launch(target, model, resolved, None).refusals
        faults += found
    return Verdict(faults, unchecked)


def _target(user: UserInput, device: str | None) -> Target | None:
    """The named device; None without a name, and for a platform's name alone if this machine has no such device.

    `device`: of the translation itself; it adds the profile if the command line names the platform alone.
    """
    from srv.planning.target import find_target

    named = user.value("device") or device
    if device is not None and named == device.partition(":")[0]:
        named = device
    try:
        return None if named is None else find_target(named)
    except Refusal as refusal:
        if refusal.rejections[0].code != "profile_needed":
            raise
        return None


def _local_model(path: str | None, options: ReadOptions) -> ModelFacts | None:
    """The facts of a model whose files are on this machine; None without files. Raises ModelError."""
    from pathlib import Path

    from srv.models.locate import locate
    from srv.models.read import read_facts

    return read_facts(locate(path), options) if path is not None and Path(path).expanduser().exists() else None


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


def _equivalent(row: Row) -> str:
    if row.refused:
        return f"{row.refused}. {row.remedy}"
    return ", ".join("--" + name.replace("_", "-") for name in row.targets) or row.note or "no setting is needed"
