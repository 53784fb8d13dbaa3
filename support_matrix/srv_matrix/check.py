"""Check that the matrix and its inputs are consistent. Every fault is a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from srv.args.config import ARGUMENTS, find_argument
from srv_matrix import architectures
from srv_matrix.ages import age_notes, ages_of
from srv_matrix.diff import compare_table, stale_reasons
from srv_matrix.evidence import Marks, prune, read_marks
from srv_matrix.evidence import faults as evidence_faults
from srv_matrix.matrix import Matrix
from srv_matrix.records import Key, Record, Status
from srv_matrix.repository import Repository


def check(matrix: Matrix, repository: Repository, marks: Marks | None = None) -> list[str]:
    """All faults of a checkout. `marks`: those of its tests, if they are already known."""
    faults = [*record_faults(matrix.records.values(), _variants(matrix)), *declaration_faults(matrix)]
    faults += [fault for table in matrix.tables for fault in table_faults(matrix, table.name)]
    faults += architectures.table_faults(matrix.architectures, repository)
    if matrix.evidence:
        marks = read_marks(repository) if marks is None else marks
        faults += evidence_faults(matrix.evidence, _testable_cells(matrix), marks, repository.is_ancestor)
    return faults


def prune_evidence(matrix: Matrix, repository: Repository) -> list[str]:
    """Remove evidence that is no longer valid from the checkout; returns the reasons, one sentence each."""
    if not matrix.evidence:
        return []
    marks = read_marks(repository)
    return prune(repository.evidence, _testable_cells(matrix), marks, repository.is_ancestor)


def _testable_cells(matrix: Matrix) -> list[Key]:
    """The cells that a test can cover directly, without those that are rolled up from values."""
    return [key for key, record in matrix.records.items() if not record.values]


def notes(matrix: Matrix, repository: Repository) -> list[str]:
    """Notes on what cannot be checked in this clone, and on the age of evidence; these are not faults."""
    commits = dict.fromkeys(line.commit for line in matrix.evidence)
    unknown = [commit for commit in commits if repository.is_ancestor(commit) is None]
    lines: list[str] = []
    if unknown:
        reason = f"it cannot be checked whether {', '.join(unknown)} is in its history (fetch the full history)"
        lines.append(f"this clone is shallow: {reason}")
    return lines + age_notes(matrix.evidence, ages_of(matrix.evidence, repository))


def _variants(matrix: Matrix) -> list[tuple[str, str]]:
    return [(manifest.name, variant) for manifest in matrix.manifests for variant in manifest.variants]


def record_faults(records: Iterable[Record], variants: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Arguments without a record, records of unknown arguments, and cells without a reason."""
    seen: set[tuple[str, str, str]] = set()
    for record in records:
        where = f"{record.feature} on {record.platform}:{record.variant}"
        if record.kind in ("arg", "value") and record.argument not in ARGUMENTS:
            yield f"the record {where} names an unknown argument"
        if record.status not in (Status.SUPPORTED, Status.UNKNOWN) and not (record.reason_code and record.reason):
            yield f"{where} is {record.status.value} without a code and a reason"
        if record.kind == "arg":
            seen.add(record.key)
    for platform, variant in variants:
        for name in ARGUMENTS:
            if (name, platform, variant) not in seen:
                yield f"the argument {name} has no record for {platform}:{variant}"


def declaration_faults(matrix: Matrix) -> Iterator[str]:
    """Declarations of unknown arguments, and declarations that a launch contradicts."""
    for manifest in matrix.manifests:
        for support in manifest.facts.support:
            argument = find_argument(support.argument)
            if argument is None:
                yield f"platform {manifest.name} declares {support.argument}, which is not an argument"
                continue
            if argument.name not in ARGUMENTS or argument.arg.planned:
                continue
            if support.status != "supported" or support.values:
                continue
            for variant in support.variants or manifest.variants:
                cell = matrix.cell(argument.name, manifest.name, variant)
                if cell is not None and cell.declared is Status.UNSUPPORTED:
                    yield (
                        f"platform {manifest.name} declares {argument.name} supported on {variant}, "
                        f"but a launch refuses it: {cell.reason}"
                    )


def table_faults(matrix: Matrix, name: str) -> Iterator[str]:
    """Rows of a published table that differ without an explanation, and explanations that apply to no row."""
    table = next(candidate for candidate in matrix.tables if candidate.name == name)
    compared = compare_table(matrix, table)
    for row in compared:
        if not row.explained:
            yield f"{name}: {row.flag} is {row.outcome.value} without an explanation ({row.detail})"
    yield from stale_reasons(table, compared)
