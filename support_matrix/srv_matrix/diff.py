"""Compare our declarations with a vendor's published table, row by row.

A row agrees only if a launch does what the page says. Where core refuses an argument as planned, the row says so, and
what the platform declares decides which of the two classes for planned arguments it has.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from srv.args.config import ARGUMENTS
from srv.args.spec import Argument
from srv_matrix.matrix import Matrix
from srv_matrix.published import Row, Table
from srv_matrix.records import Record, Status

ANY = "*"  # in the arguments of a reason: every row of its class


class Outcome(enum.Enum):
    """The result of comparing a row."""

    AGREE = "AGREE"  # the same status on every variant, and the same values
    VENDOR_ONLY = "VENDOR_ONLY"  # only the vendor supports it
    VENDOR_ONLY_PLANNED = "VENDOR_ONLY_PLANNED"  # the vendor supports it; ours is planned, so a launch refuses it
    OURS_ONLY = "OURS_ONLY"  # only we support it
    OURS_PLANNED = "OURS_PLANNED"  # the vendor does not support it; ours will, but a launch still refuses it
    VALUE_SUBSET = "VALUE_SUBSET"  # both support it, with different values
    VARIANT_DIFFERS = "VARIANT_DIFFERS"  # the same status on some variants only
    UNKNOWN_ARG = "UNKNOWN_ARG"  # our argument is not in their table
    MISSING_ARG = "MISSING_ARG"  # their row is not an argument of srv
    NO_EVIDENCE = "NO_EVIDENCE"  # we have the argument but declare nothing about it


@dataclass(frozen=True, slots=True)
class Compared:
    """One of their rows (None: only we have the argument) with its outcome; `detail` describes the difference."""

    flag: str
    row: Row | None
    argument: Argument | None
    outcome: Outcome
    detail: str
    reason: str = ""

    @property
    def explained(self) -> bool:
        return bool(self.reason) or self.outcome in (Outcome.AGREE, Outcome.UNKNOWN_ARG)


def compare_table(matrix: Matrix, table: Table) -> tuple[Compared, ...]:
    """Every row of a published table with its outcome, then our arguments that it does not have."""
    rows = [_compare(matrix, table, row) for row in table.rows]
    names = {row.argument.name for row in rows if row.argument is not None}
    ours = [
        Compared(argument.flag, None, argument, Outcome.UNKNOWN_ARG, "the published table does not have it")
        for name, argument in ARGUMENTS.items()
        if name not in names
    ]
    return (*rows, *ours)


def counts(compared: Iterable[Compared]) -> dict[str, int]:
    """Number of rows by outcome, including outcomes without rows."""
    counted = Counter(row.outcome for row in compared)
    return {outcome.value: counted[outcome] for outcome in Outcome}


def stale_reasons(table: Table, compared: Iterable[Compared]) -> list[str]:
    """Reasons that apply to no row, because there is no such row or it has another outcome."""
    outcomes = {row.flag: row.outcome.value for row in compared}
    stale: list[str] = []
    for reason in table.reasons:
        for flag in reason.flags:
            if flag == ANY:
                if reason.outcome not in outcomes.values():
                    stale.append(
                        f"{table.name}: there is a reason for all {reason.outcome} rows, but no row has that class"
                    )
            elif outcomes.get(flag) != reason.outcome:
                stale.append(
                    f"{table.name}: there is a reason for {flag} as {reason.outcome}, but it is {outcomes.get(flag)}"
                )
    return stale


def _compare(matrix: Matrix, table: Table, row: Row) -> Compared:
    argument = table.argument(row)
    outcome, detail = Outcome.MISSING_ARG, "it is not an argument of srv"
    if argument is not None:
        outcome, detail = _judge(matrix, table, row, argument)
    return Compared(row.flag, row, argument, outcome, detail, _reason(table, row.flag, outcome, argument))


def _reason(table: Table, flag: str, outcome: Outcome, argument: Argument | None) -> str:
    """The reason that the table gives; else, of a planned argument that the vendor supports, what core says itself."""
    for pattern in (flag, ANY):
        for reason in table.reasons:
            if reason.outcome == outcome.value and pattern in reason.flags:
                return reason.text
    if outcome is Outcome.VENDOR_ONLY_PLANNED and argument is not None and argument.arg.planned:
        return _sentence(argument.arg.planned)
    return ""


def _sentence(clause: str) -> str:
    return f"{clause[:1].upper()}{clause[1:]}."


def _judge(matrix: Matrix, table: Table, row: Row, argument: Argument) -> tuple[Outcome, str]:
    cells = {variant: matrix.cell(argument.name, table.platform, variant) for variant in row.supported}
    judged = {variant: cell for variant, cell in cells.items() if cell and cell.declared is not Status.UNKNOWN}
    detail = "; ".join(
        f"{variant}: theirs is {'yes' if supported else 'no'}, ours {_ours(cells[variant])}"
        for variant, supported in row.supported.items()
    )
    if len(judged) < len(row.supported):
        return Outcome.NO_EVIDENCE, detail
    agree = [variant for variant, cell in judged.items() if cell.declared.works == row.supported[variant]]
    planned = any(cell.core is Status.PLANNED for cell in judged.values())
    if len(agree) == len(row.supported):
        if planned and any(row.supported.values()):
            return Outcome.VENDOR_ONLY_PLANNED, detail
        return _judge_values(matrix, table, row, argument)
    theirs = {row.supported[variant] for variant in row.supported if variant not in agree}
    if agree or len(theirs) > 1:
        return Outcome.VARIANT_DIFFERS, detail
    if theirs == {True}:
        return Outcome.VENDOR_ONLY, detail
    return (Outcome.OURS_PLANNED if planned else Outcome.OURS_ONLY), detail


def _ours(cell: Record | None) -> str:
    """What a launch does with it, and for what is planned, what the platform declares."""
    if cell is None:
        return "missing"
    if cell.core is Status.PLANNED and cell.declared.works:
        return f"planned (the platform declares it {cell.declared.value})"
    return cell.declared.value


def _judge_values(matrix: Matrix, table: Table, row: Row, argument: Argument) -> tuple[Outcome, str]:
    """Compare the values of rows whose status agrees; a row without a list of values always agrees."""
    theirs = set(row.options)
    for variant in (variant for variant, supported in row.supported.items() if supported and theirs):
        ours, planned = _values(matrix, argument, table.platform, variant)
        if (ours or planned) and ours != theirs:
            more, less, later = sorted(ours - theirs), sorted(theirs - ours - planned), sorted(theirs & planned)
            parts = [f"only ours: {', '.join(more)}"] if more else []
            parts += [f"only theirs: {', '.join(less)}"] if less else []
            parts += [f"theirs, planned in srv: {', '.join(later)}"] if later else []
            return Outcome.VALUE_SUBSET, f"{variant}: {'; '.join(parts)}"
    return Outcome.AGREE, ""


def _values(matrix: Matrix, argument: Argument, platform: str, variant: str) -> tuple[set[str], set[str]]:
    """The values that a launch accepts, and those that the platform declares and core plans, if they can be listed."""
    records = matrix.values.get((argument.name, platform, variant), ())
    accepted = {record.feature.partition("=")[2] for record in records if record.status.works}
    declared = {record.feature.partition("=")[2] for record in records if record.declared.works}
    return accepted, declared - accepted
