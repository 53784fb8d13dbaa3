"""`srv conformance`: check whether a platform plugin does what it declares.

Exit status of `run`: 0 if no check failed, 1 if a check failed, 2 if the checks could not run (no such device on this
machine, or an invalid command line).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from srv.errors import Refusal, Rejection

if TYPE_CHECKING:
    from srv.testing.conformance.model import Outcome, Report

LEVELS = ("L0", "L1", "L2", "L3", "L4")
FAILED, NOT_RUN = 1, 2
# Checks that are skipped to name backends that no other check has run.
_NAMES_BACKENDS = ("backends.used", "backends.exercised")
_MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped", "undeclared": "undeclared"}


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("conformance", help="check that a platform plugin does what it declares")
    parser.set_defaults(handler=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    running = verbs.add_parser(
        "run",
        help="run the checks up to a level",
        description="Run the conformance checks of a platform up to a level: L0 needs no device, L1 checks what "
        "holds on any device, L2 compares with references, L3 runs the engine, L4 sweeps the arguments on a server.",
    )
    running.add_argument("--device", required=True, metavar="NAME[:VARIANT]", help="the platform to check")
    running.add_argument("--level", choices=LEVELS, default="L3", help="highest level to run (default: %(default)s)")
    running.add_argument("--report", type=Path, metavar="FILE", help="write the report to FILE, as JSON lines")
    running.add_argument(
        "--only",
        action="extend",
        nargs="+",
        default=[],
        metavar="CHECK",
        help="names of checks, or of groups of checks (pool)",
    )
    running.set_defaults(handler=run)
    listing = verbs.add_parser("list", help="list all checks, one per line")
    listing.add_argument("--markdown", action="store_true", help="print the tables of docs/conformance.md")
    listing.set_defaults(handler=run_list)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def run(namespace: argparse.Namespace) -> int:
    """Run the checks, print one line for each when it ends, and write the report."""
    from srv.testing.conformance import Level
    from srv.testing.conformance import run as run_checks
    from srv.testing.conformance.runner import Interrupted

    report_path: Path | None = namespace.report
    if report_path is not None and not report_path.resolve().parent.is_dir():
        raise _refused(
            "report", str(report_path), "its folder does not exist", "Create the folder, or choose another one."
        )
    try:
        report = run_checks(namespace.device, Level[namespace.level], only=namespace.only, observe=_print)
    except ValueError as error:
        remedy = "`srv conformance list` shows all checks."
        raise _refused("only", " ".join(namespace.only), str(error), remedy) from error
    except Interrupted as error:
        if report_path is not None:
            error.report.write(report_path)
        _summarize(error.report, report_path)
        raise
    if report_path is not None:
        report.write(report_path)
    _summarize(report, report_path)
    if not report.passed:
        return FAILED
    return NOT_RUN if report.level > Level.L0 and not report.device.get("available") else 0


def _refused(what: str, value: str, reason: str, remedy: str) -> Refusal:
    return Refusal([Rejection("bad_value", what, value, "command line", reason, remedy)])


def _print(outcome: Outcome) -> None:
    line = f"{outcome.level.name}  {_MARKS[outcome.status]:10}  {outcome.check:25}  {outcome.message}"
    print(line + (f"\n{'':43}{outcome.remedy}" if outcome.remedy else ""), flush=True)


def _summarize(report: Report, path: Path | None) -> None:
    counts = {status: len(report.of(status)) for status in ("passed", "failed", "skipped", "undeclared")}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    print(f"\n{report.device.get('platform')} ({versions}): {summary or 'nothing was checked'}")
    for outcome in report.of("skipped"):
        if outcome.check in _NAMES_BACKENDS and outcome.message.startswith("not "):
            print(f"{outcome.check}: {outcome.message}")
    if path is not None:
        print(f"report: {path}")
    if report.level > 0 and not report.device.get("available"):
        print(f"only L0 could be checked on this machine: {report.device.get('unavailable')}", file=sys.stderr)


def run_list(namespace: argparse.Namespace) -> int:
    """Print all checks."""
    from srv.testing.conformance.catalogue import CHECKS, markdown

    if namespace.markdown:
        print(markdown(), end="")
        return 0
    for check in CHECKS:
        needs = f" (if the platform declares {check.needs})" if check.needs else ""
        print(f"{check.level.name}  {check.name:25}  {check.summary}{needs}")
    return 0
