"""Every implemented argument has a test that is evidence, and every mark names a cell that there is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from srv.args.config import ARGUMENTS
from srv.platform.probe import probe
from srv.platform.registry import find_platforms
from srv_matrix.evidence import collect_marks, from_line, to_line
from srv_matrix.inventory import read as read_inventory
from srv_matrix.matrix import Matrix, make_matrix
from srv_matrix.records import Evidence, Level
from srv_matrix.repository import Repository

ROOT = Path(__file__).resolve().parents[2]
WRITES_MARKS_OF_ITS_OWN = "test_matrix_evidence.py"  # in the text of a made-up test
Marks = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def marks() -> Marks:
    """All marks of this checkout, as pytest collects them."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "import covers" in path.read_text(encoding="utf-8") and path.name != WRITES_MARKS_OF_ITS_OWN
    ]
    return collect_marks(Repository(ROOT), files)


@pytest.fixture(scope="module")
def shown(marks: Marks) -> Matrix:
    """The CPU's matrix as it would be if every marked test had passed on this machine."""
    found = find_platforms()["cpu"]
    device = probe(found).device
    assert device is not None
    passed = [
        Evidence(tuple(mark["covers"]), "cpu", device.variant, Level[mark["level"]], test, "passed", "c", "p", "", "d",
                 "2026-01-01")
        for test, mark in marks.items()
    ]  # fmt: skip
    assert [from_line(to_line(each)) for each in passed] == passed
    return make_matrix([found.loaded], evidence=passed, inventory=read_inventory(Repository(ROOT).inventory))


def test_every_implemented_argument_has_evidence(marks: Marks) -> None:
    covered = {cell.partition("=")[0] for mark in marks.values() for cell in mark["covers"]}
    implemented = {name for name, argument in ARGUMENTS.items() if argument.status == "implemented"}
    assert implemented - covered == set()


def test_no_planned_argument_has_any(marks: Marks) -> None:
    covered = {cell.partition("=")[0] for mark in marks.values() for cell in mark["covers"]}
    assert {name for name in covered if name in ARGUMENTS and ARGUMENTS[name].arg.planned} == set()


def test_every_mark_names_a_cell_that_works(marks: Marks, shown: Matrix) -> None:
    device = shown.evidence[0].variant
    for test, mark in marks.items():
        for name in mark["covers"]:
            cell = shown.cell(name, "cpu", device)
            assert cell is not None, f"{test} covers {name}, which is no cell"
            assert cell.status.works, f"{test} covers {name}, which is {cell.status.value}"
            assert not cell.by_values, f"{test} covers {name}: name one of its values"


def test_what_the_marks_come_to(shown: Matrix) -> None:
    """If all pass, every implemented argument but one is verified here, and every endpoint, op and model."""
    device = shown.evidence[0].variant
    bare = [
        name
        for name, argument in ARGUMENTS.items()
        if argument.status == "implemented" and not _verified(shown, name, device)
    ]
    assert bare == ["mem_fraction_static"]  # its least value asks for less than the runtime itself takes
    kinds = (
        *shown.of_kind("endpoint"),
        *shown.of_kind("op"),
        *shown.of_kind("model"),
    )
    assert [name for name in kinds if not _verified(shown, name, device)] == []


def _verified(shown: Matrix, name: str, variant: str) -> bool:
    cell = shown.cell(name, "cpu", variant)
    return cell is not None and cell.verified
