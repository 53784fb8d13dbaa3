"""Comparing our declarations with a vendor's published table, row by row.

What is compared is what the platform declares, not what core implements: an argument that is planned and declared
agrees with a "yes".
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

ANY = "*"  # in a reason's arguments: every row of its class


class Outcome(enum.Enum):
    """How a row compares."""

    AGREE = "AGREE"  # the same on every variant, and the same values
    VENDOR_ONLY = "VENDOR_ONLY"  # they have it, we do not
    OURS_ONLY = "OURS_ONLY"  # we have it, they do not
    VALUE_SUBSET = "VALUE_SUBSET"  # both have it, with other values
    VARIANT_DIFFERS = "VARIANT_DIFFERS"  # the same on some variants alone
    UNKNOWN_ARG = "UNKNOWN_ARG"  # an argument of ours that their table does not have
    MISSING_ARG = "MISSING_ARG"  # a row of theirs that is no argument of ours
    NO_EVIDENCE = "NO_EVIDENCE"  # we have the argument and declare nothing of it


@dataclass(frozen=True, slots=True)
class Compared:
    """A row of theirs (None: an argument of ours alone) with its class; `detail` says what stands against what."""

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
    """Every row of a published table with its class, then the arguments that it does not have."""
    rows = [_compare(matrix, table, row) for row in table.rows]
    known = {each.argument.name for each in rows if each.argument is not None}
    ours = [
        Compared(argument.flag, None, argument, Outcome.UNKNOWN_ARG, "the published table does not have it")
        for name, argument in ARGUMENTS.items()
        if name not in known
    ]
    return (*rows, *ours)


def counts(compared: Iterable[Compared]) -> dict[str, int]:
    """Rows by class, every class named."""
    counted = Counter(each.outcome for each in compared)
    return {outcome.value: counted[outcome] for outcome in Outcome}


def stale_reasons(table: Table, compared: Iterable[Compared]) -> list[str]:
    """Reasons that explain nothing: their row is of another class, or there is no such row."""
    outcomes = {each.flag: each.outcome.value for each in compared}
    found: list[str] = []
    for reason in table.reasons:
        for flag in reason.flags:
            if flag == ANY:
                if reason.outcome not in outcomes.values():
                    found.append(f"{table.name}: a reason for every {reason.outcome}, and no row is of that class")
            elif outcomes.get(flag) != reason.outcome:
                found.append(f"{table.name}: a reason for {flag} as {reason.outcome}, but it is {outcomes.get(flag)}")
    return found


def _compare(matrix: Matrix, table: Table, row: Row) -> Compared:
    argument = table.argument(row)
    outcome, detail = Outcome.MISSING_ARG, "it is no argument of srv"
    if argument is not None:
        outcome, detail = _judge(matrix, table, row, argument)
    return Compared(row.flag, row, argument, outcome, detail, _reason(table, row.flag, outcome))


def _reason(table: Table, flag: str, outcome: Outcome) -> str:
    for wanted in (flag, ANY):
        for reason in table.reasons:
            if reason.outcome == outcome.value and wanted in reason.flags:
                return reason.text
    return ""


def _judge(matrix: Matrix, table: Table, row: Row, argument: Argument) -> tuple[Outcome, str]:
    cells = {variant: matrix.cell(argument.name, table.platform, variant) for variant in row.says}
    known = {variant: cell for variant, cell in cells.items() if cell and cell.declared is not Status.UNKNOWN}
    detail = "; ".join(
        f"{variant}: they say {'yes' if says else 'no'}, we {_word(cells[variant])}"
        for variant, says in row.says.items()
    )
    if len(known) < len(row.says):
        return Outcome.NO_EVIDENCE, detail
    agree = [variant for variant, cell in known.items() if cell.declared.works == row.says[variant]]
    if len(agree) == len(row.says):
        return _judge_values(matrix, table, row, argument)
    theirs = {row.says[variant] for variant in row.says if variant not in agree}
    if agree or len(theirs) > 1:
        return Outcome.VARIANT_DIFFERS, detail
    return (Outcome.VENDOR_ONLY if theirs == {True} else Outcome.OURS_ONLY), detail


def _word(cell: Record | None) -> str:
    return cell.declared.value if cell else "nothing"


def _judge_values(matrix: Matrix, table: Table, row: Row, argument: Argument) -> tuple[Outcome, str]:
    """Rows that agree, by the values that they list; a row that lists none says nothing of values."""
    theirs = set(row.options)
    for variant in (variant for variant, says in row.says.items() if says and theirs):
        ours = _values(matrix, argument, table.platform, variant)
        if ours and ours != theirs:
            more, less = sorted(ours - theirs), sorted(theirs - ours)
            parts = [f"only ours: {', '.join(more)}"] if more else []
            parts += [f"only theirs: {', '.join(less)}"] if less else []
            return Outcome.VALUE_SUBSET, f"{variant}: {'; '.join(parts)}"
    return Outcome.AGREE, ""


def _values(matrix: Matrix, argument: Argument, platform: str, variant: str) -> set[str]:
    """The values that the platform declares to work, if they can be listed."""
    records = matrix.values.get((argument.name, platform, variant), ())
    return {record.feature.partition("=")[2] for record in records if record.declared.works}
