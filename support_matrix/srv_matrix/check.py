"""Whether the matrix, its inputs and its pages agree. Every fault is a sentence; none found means green."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from srv.args.config import ARGUMENTS, find_argument
from srv_matrix.data import to_csv, to_json
from srv_matrix.diff import compare_table, stale_reasons
from srv_matrix.evidence import collect_marks, marked_files, prune, unrecorded
from srv_matrix.evidence import faults as evidence_faults
from srv_matrix.matrix import Matrix
from srv_matrix.pages import pages
from srv_matrix.records import Key, Record, Status
from srv_matrix.repository import Repository

_SHOWN = 6  # lines of a stale page's difference
_NAMED = 4  # tests that a note names
Marks = Mapping[str, Mapping[str, Any]]


def outputs(matrix: Matrix) -> dict[str, str]:
    """Every file under `docs/support`, by name."""
    return {**pages(matrix), "support.json": to_json(matrix), "support.csv": to_csv(matrix)}


def write_outputs(matrix: Matrix, folder: Path) -> tuple[str, ...]:
    """Write every file, remove what is left of former ones, and tell the names of those that changed."""
    made = outputs(matrix)
    folder.mkdir(parents=True, exist_ok=True)
    changed = [name for name, text in made.items() if _read(folder / name) != text]
    for name in changed:
        (folder / name).write_text(made[name], encoding="utf-8")
    for name in _strangers(made, folder):
        (folder / name).unlink()
        changed.append(name)
    return tuple(changed)


def marks_for(matrix: Matrix, repository: Repository) -> Marks:
    """The marks of all tests that are evidence or could be; none are looked for where there is no evidence."""
    if not matrix.evidence:
        return {}
    return collect_marks(
        repository, [*(each.test.partition("::")[0] for each in matrix.evidence), *marked_files(repository)]
    )


def check(matrix: Matrix, repository: Repository, marks: Marks | None = None) -> list[str]:
    """All faults of a checkout. `marks`: what `marks_for` gave, if it was asked already."""
    found = [*record_faults(matrix.records.values(), _cells(matrix)), *declaration_faults(matrix)]
    found += [fault for table in matrix.tables for fault in table_faults(matrix, table.name)]
    if matrix.evidence:
        marks = marks_for(matrix, repository) if marks is None else marks
        found += evidence_faults(matrix.evidence, _shown(matrix), marks, repository.is_ancestor)
    return [*found, *page_faults(outputs(matrix), repository.pages)]


def prune_evidence(matrix: Matrix, repository: Repository) -> list[str]:
    """Take out of the checkout's evidence what no longer stands; what spoke against it, a sentence each."""
    if not matrix.evidence:
        return []
    return prune(repository.evidence, _shown(matrix), marks_for(matrix, repository), repository.is_ancestor)


def _shown(matrix: Matrix) -> list[Key]:
    """The cells that a test can show by itself."""
    return [key for key, record in matrix.records.items() if not record.by_values]


def notes(matrix: Matrix, repository: Repository, marks: Marks | None = None) -> list[str]:
    """What cannot be judged here, or was not run, and speaks against nothing."""
    commits = dict.fromkeys(each.commit for each in matrix.evidence)
    unseen = [commit for commit in commits if repository.is_ancestor(commit) is None]
    found: list[str] = []
    if unseen:
        told = f"whether {', '.join(unseen)} is in its history cannot be seen (fetch the rest)"
        found.append(f"this clone is shallow: {told}")
    marks = marks_for(matrix, repository) if marks is None else marks
    for platform, tests in unrecorded(matrix.evidence, marks).items():
        named = ", ".join(tests[:_NAMED]) + (", ..." if len(tests) > _NAMED else "")
        found.append(f"{len(tests)} marked tests have no line of {platform} (record them there): {named}")
    return found


def _cells(matrix: Matrix) -> list[tuple[str, str]]:
    return [(manifest.name, variant) for manifest in matrix.manifests for variant in manifest.variants]


def record_faults(records: Iterable[Record], places: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Arguments without a record, records of what is no argument, and cells that give no reason."""
    seen: set[tuple[str, str, str]] = set()
    for record in records:
        where = f"{record.feature} on {record.platform}:{record.variant}"
        if record.kind in ("arg", "value") and record.argument not in ARGUMENTS:
            yield f"the record {where} names an unknown argument"
        if record.status not in (Status.SUPPORTED, Status.UNKNOWN) and not (record.reason_code and record.reason):
            yield f"{where} is {record.status.value} without a code and a reason"
        if record.kind == "arg":
            seen.add(record.key)
    for platform, variant in places:
        for name in ARGUMENTS:
            if (name, platform, variant) not in seen:
                yield f"the argument {name} has no record on {platform}:{variant}"


def declaration_faults(matrix: Matrix) -> Iterator[str]:
    """Declarations that name no argument, and cells that a launch judges otherwise than they are declared."""
    for manifest in matrix.manifests:
        for said in manifest.facts.support:
            argument = find_argument(said.argument)
            if argument is None:
                yield f"platform {manifest.name} declares {said.argument}, which is no argument"
                continue
            if argument.name not in ARGUMENTS or argument.arg.planned or said.status != "supported" or said.values:
                continue
            for variant in said.variants or manifest.variants:
                cell = matrix.cell(argument.name, manifest.name, variant)
                if cell is not None and cell.declared is Status.UNSUPPORTED:
                    yield (
                        f"platform {manifest.name} declares {argument.name} supported on {variant}, "
                        f"but a launch refuses it: {cell.reason}"
                    )


def table_faults(matrix: Matrix, name: str) -> Iterator[str]:
    """Rows of a published table that differ and are not explained, and reasons that explain nothing."""
    table = next(each for each in matrix.tables if each.name == name)
    compared = compare_table(matrix, table)
    for each in compared:
        if not each.explained:
            yield f"{name}: {each.flag} is {each.outcome.value} and nobody says why ({each.detail})"
    yield from stale_reasons(table, compared)


def page_faults(made: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Pages that are missing, stale, or made by nobody."""
    for name, text in made.items():
        present = _read(folder / name)
        if present is None:
            yield f"{folder.name}/{name} is missing: run `make matrix`"
        elif present != text:
            told = difflib.unified_diff(present.splitlines(), text.splitlines(), "committed", "made", lineterm="", n=0)
            lines = [line[:160] for line in list(told)[2 : 2 + _SHOWN]]
            yield f"{folder.name}/{name} is stale: run `make matrix`\n    " + "\n    ".join(lines)
    yield from (f"{folder.name}/{name} is no page of the matrix" for name in _strangers(made, folder))


def _strangers(made: Mapping[str, str], folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.is_file() and path.name not in made)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
