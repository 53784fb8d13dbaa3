"""`srv matrix`: its commands, which `srv` gets through the group `srv.commands`."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from srv.args.config import ARGUMENTS, DEPRECATED
from srv_matrix.ages import Age, age_of, ages_of
from srv_matrix.check import check, notes, prune_evidence
from srv_matrix.checkpoints import record as record_verdicts
from srv_matrix.diff import Compared, Outcome, compare_table, counts
from srv_matrix.evidence import compare, read_file, read_folder, read_marks
from srv_matrix.marks import mark
from srv_matrix.matrix import Matrix, read_matrix, read_plugin_matrix
from srv_matrix.outputs import REMEDY, stale_outputs, write_outputs
from srv_matrix.pages import pages
from srv_matrix.places import places, selected
from srv_matrix.published import Table, read_rows, read_tables
from srv_matrix.record import Recording
from srv_matrix.records import Record, Status
from srv_matrix.repository import MatrixError, Repository, find_repository
from srv_matrix.site import write_site

FAULTY = 2


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line of `srv`."""
    parser = subparsers.add_parser("matrix", help="show and check what works on which platform")
    parser.set_defaults(handler=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary, handler in (
        ("generate", "write the pages under docs/support", run_generate),
        ("check", "fail if records, evidence and published tables are inconsistent", run_check),
        ("record", "run the tests again that are evidence, the oldest first", run_record),
        ("checkpoints", "plan published checkpoints again, and record the verdicts", run_checkpoints),
        ("prune", "remove evidence that is no longer valid from support_matrix/evidence", run_prune),
        ("diff", "compare our declarations with a vendor's published table", run_diff),
        ("show", "show the arguments on one platform and variant", run_show),
        ("site", "write the filterable page, and the cells as JSON and CSV", run_site),
        ("coverage", "show counts by status and platform", run_coverage),
    ):
        verb = verbs.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        verb.add_argument(
            "--root", type=Path, metavar="FOLDER", help="a folder of the checkout (default: the current folder)"
        )
        verb.set_defaults(handler=handler)
        _add_options(name, verb)


def _add_options(name: str, verb: argparse.ArgumentParser) -> None:
    if name == "generate":
        verb.add_argument(
            "--compare", action="store_true", help="write nothing, and fail if a page or the inventory is stale"
        )
        verb.add_argument(
            "--plugin", metavar="NAME", help="an installed plugin: write its own pages, outside a checkout"
        )
        verb.add_argument(
            "--evidence",
            type=Path,
            action="append",
            default=[],
            metavar="REPORT",
            help="its conformance report; repeatable",
        )
        verb.add_argument(
            "--out", type=Path, metavar="FOLDER", help="where to write these pages (default: NAME-support)"
        )
    if name == "check":
        verb.add_argument(
            "--rerun", type=Path, metavar="FILE", help="also compare the outcomes of a run of tests with the evidence"
        )
    if name == "record":
        verb.add_argument(
            "--platform", default="", metavar="NAME[:VARIANT]", help="only there (default: all that can run here)"
        )
        verb.add_argument("--minutes", type=float, default=30, help="how long to record (default: %(default)g)")
    if name == "checkpoints":
        verb.add_argument("--only", default="", metavar="TEXT", help="only those whose ids contain a text")
    if name == "site":
        verb.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to write it")
    if name == "diff":
        verb.add_argument("--against", type=Path, metavar="CSV", help="one table (default: all in index.toml)")
        verb.add_argument("--all", action="store_true", help="also show rows that agree")
    if name == "show":
        verb.add_argument("--device", required=True, metavar="NAME:VARIANT", help="for example npu:a3")
        verb.add_argument(
            "--status", choices=[status.value for status in Status], help="show only arguments with this status"
        )
    if name in ("diff", "show", "coverage"):
        verb.add_argument("--json", action="store_true", help="print JSON")


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def run_generate(namespace: argparse.Namespace) -> int:
    """Update the inventory, write the pages, and print the names of those that changed."""
    if namespace.plugin is not None:
        return _generate_for_plugin(namespace)
    if namespace.evidence or namespace.out:
        raise MatrixError("--evidence and --out belong to the pages of a plugin. Set --plugin NAME, or leave them out")
    repository = _repository(namespace.root)
    if namespace.compare:
        return _compare(repository)
    changed = write_outputs(repository)
    print(f"{len(changed)} files changed" + "".join(f"\n  {name}" for name in sorted(changed)))
    return 0


def _compare(repository: Repository) -> int:
    """Print what is stale, and the command that mends it."""
    stale = stale_outputs(repository)
    print(
        "".join(f"- {page}\n" for page in stale)
        + (f"To mend this, run:\n{REMEDY}" if stale else "the pages are up to date")
    )
    return FAULTY if stale else 0


def _generate_for_plugin(namespace: argparse.Namespace) -> int:
    """Write the pages of one plugin, with its own evidence, into a folder of its vendor; nothing else is removed."""
    matrix = read_plugin_matrix(namespace.plugin, namespace.evidence)
    folder: Path = namespace.out or Path(f"{namespace.plugin}-support")
    write_site(matrix, folder)
    for name, text in pages(matrix).items():
        (folder / name).write_text(text, encoding="utf-8")
    failed = sum(bool(record.failed) for record in matrix.records.values())
    verified = sum(bool(record.ran) for record in matrix.records.values())
    print(
        f"{folder}: {len(matrix.records)} cells, {verified} of which a check has run"
        + (f", {failed} failed" if failed else "")
    )
    return 0


def run_site(namespace: argparse.Namespace) -> int:
    """Write the static site and print the path of its page."""
    repository = _repository(namespace.root)
    matrix = read_matrix(repository)
    print(write_site(matrix, namespace.out, ages_of(matrix.evidence, repository)))
    return 0


def run_check(namespace: argparse.Namespace) -> int:
    """Print all faults and notes; exit status 2 if there is a fault."""
    repository = _repository(namespace.root)
    fresh = None if namespace.rerun is None else read_file(namespace.rerun)
    with ThreadPoolExecutor(1) as pool:  # pytest collects the marks in a process of its own meanwhile
        collected = pool.submit(read_marks, repository)
        matrix = read_matrix(repository)
        marks = collected.result()
    faults, remarks = check(matrix, repository, marks), notes(matrix, repository)
    if fresh is not None:
        contradictions, skips = compare(matrix.evidence, fresh, strict=bool(os.environ.get("CI")))
        faults += contradictions
        remarks += skips
    for line in (*faults, *(f"note: {remark}" for remark in remarks)):
        print(f"- {line}")
    verdict = "the support matrix is consistent" if not faults else f"{len(faults)} faults"
    print(f"{verdict}: {len(matrix.records)} cells, {len(matrix.evidence)} lines of evidence")
    return FAULTY if faults else 0


def run_record(namespace: argparse.Namespace) -> int:
    """Record evidence for a limited time; exit status 2 if a test failed."""
    end = time.monotonic() + namespace.minutes * 60
    repository = _repository(namespace.root)
    chosen = selected(places(repository), namespace.platform)
    return 0 if Recording(repository, chosen, end).run() else FAULTY


def run_checkpoints(namespace: argparse.Namespace) -> int:
    """Record the verdicts of plans, and print those that changed; to be reviewed before they are committed."""
    for line in record_verdicts(_repository(namespace.root).checkpoints, namespace.only):
        print(line, flush=True)
    return 0


def run_prune(namespace: argparse.Namespace) -> int:
    """Remove invalid evidence and print the reasons; `make evidence` records it again after the commit."""
    repository = _repository(namespace.root)
    before = read_matrix(repository)
    for line in prune_evidence(before, repository):
        print(f"- {line}")
    removed = len(before.evidence) - len(read_folder(repository.evidence))
    print(f"{removed} lines of evidence removed")
    return 0


def run_diff(namespace: argparse.Namespace) -> int:
    """Print how published tables compare with ours; exit status 2 if a difference is not explained."""
    repository = _repository(namespace.root)
    tables = _tables(repository, namespace.against)
    matrix = read_matrix(repository)
    compared = [(table, compare_table(matrix, table)) for table in tables]
    shown_rows = {
        table.name: [row for row in rows if namespace.all or row.outcome is not Outcome.AGREE]
        for table, rows in compared
    }
    if namespace.json:
        report = {
            table.name: {
                "rows": len(table.rows),
                "counts": counts(rows),
                "differences": [_difference(row) for row in shown_rows[table.name]],
            }
            for table, rows in compared
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        for table, rows in compared:
            print(f"{table.title}: {len(table.rows)} rows compared with platform {table.platform}")
            print("".join(f"  {name:<20}{count:>4}\n" for name, count in counts(rows).items()))
            for row in shown_rows[table.name]:
                print(f"{row.outcome.value:<20}{row.flag}  {row.detail}" + _indented_line(row.reason, 20))
    explained = all(row.explained for _, rows in compared for row in rows)
    return 0 if explained else FAULTY


def _difference(compared: Compared) -> dict[str, str]:
    return {
        "argument": compared.flag,
        "class": compared.outcome.value,
        "detail": compared.detail,
        "reason": compared.reason,
    }


def _indented_line(text: str, indent: int) -> str:
    return f"\n{'':<{indent}}{text}" if text else ""


def run_show(namespace: argparse.Namespace) -> int:
    """Print one platform's arguments on one variant."""
    platform, _, variant = namespace.device.partition(":")
    repository = _repository_if_any(namespace.root)
    matrix = read_matrix(repository, (platform,))
    ages = ages_of(matrix.evidence, repository) if repository is not None else {}
    variants = matrix.manifests[0].variants
    if variant not in variants:
        raise MatrixError(f"--device {namespace.device}: set a variant of {platform}, one of {', '.join(variants)}")
    cells = [cell for cell in _cells(matrix, platform, variant) if namespace.status in (None, cell.status.value)]
    if namespace.json:
        shown = [_shown(cell) | {"age": _shown_age(age_of(cell, ages))} for cell in cells]
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return 0
    for cell in cells:
        reason = f"{cell.reason} [{cell.reason_code}]" if cell.reason_code else ""
        age = age_of(cell, ages)
        ran = "" if age is None else f", ran {age}" + (" (old)" if age.is_old else "")
        print(f"{cell.feature:<48}{mark(cell)}{ran}" + _indented_line(reason, 6))
    return 0


def _cells(matrix: Matrix, platform: str, variant: str) -> list[Record]:
    return [cell for name in ARGUMENTS if (cell := matrix.cell(name, platform, variant)) is not None]


def _shown(record: Record) -> dict[str, Any]:
    return {
        "argument": record.feature,
        "status": record.status.value,
        "declared": record.declared.value,
        "core": record.core.value,
        "level": record.level.name if record.level is not None else None,
        "reason_code": record.reason_code,
        "reason": record.reason,
    }


def _shown_age(age: Age | None) -> dict[str, Any] | None:
    return None if age is None else {**age._asdict(), "old": age.is_old}


def run_coverage(namespace: argparse.Namespace) -> int:
    """Print the number of arguments by platform and status, and how many of them were run on the device."""
    matrix = read_matrix(_repository_if_any(namespace.root))
    variants = [(manifest.name, variant) for manifest in matrix.manifests for variant in manifest.variants]
    numbers_by_variant = {f"{name}:{variant}": _numbers(_cells(matrix, name, variant)) for name, variant in variants}
    core = Counter(argument.status for argument in (*ARGUMENTS.values(), *DEPRECATED.values()))
    if namespace.json:
        print(json.dumps({"arguments": core.total(), "core": core, "platforms": numbers_by_variant}, indent=2))
        return 0
    print(f"{core.total()} arguments: " + ", ".join(f"{count} {status}" for status, count in core.items()))
    columns = [*(status.value for status in Status), "verified"]
    print(f"{'':<14}" + "".join(f"{column:>16}" for column in columns))
    for variant, numbers in numbers_by_variant.items():
        print(f"{variant:<14}" + "".join(f"{numbers[column]:>16}" for column in columns))
    return 0


def _numbers(cells: Sequence[Record]) -> dict[str, int]:
    counted = Counter(cell.status.value for cell in cells)
    return {status.value: counted[status.value] for status in Status} | {"verified": sum(c.verified for c in cells)}


def _repository(root: Path | None) -> Repository:
    """The checkout that contains `root`, or else the current folder; MatrixError if there is none."""
    start = root or Path.cwd()
    repository = find_repository(start.resolve())
    if repository is None:
        raise MatrixError(f"{start} is not in a checkout of srv. Run the command in one, or set it with --root")
    return repository


def _repository_if_any(root: Path | None) -> Repository | None:
    """As `_repository`, but without --root None outside a checkout, where declarations can still be shown."""
    return find_repository(Path.cwd()) if root is None else _repository(root)


def _tables(repository: Repository, path: Path | None) -> tuple[Table, ...]:
    """The tables to compare: all, or the one with the name of this file, with the rows of this file."""
    tables = read_tables(repository.published)
    if path is None:
        return tables
    by_name = {table.name: table for table in tables}
    if path.stem not in by_name:
        raise MatrixError(
            f"--against {path}: there is no table {path.stem}. Name the file after a table in published/index.toml: "
            f"{', '.join(f'{name}.csv' for name in by_name) or 'it lists none'}"
        )
    table = by_name[path.stem]
    return (replace(table, rows=read_rows(path, table.variants)),)
