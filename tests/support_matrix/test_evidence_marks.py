"""Every implemented argument has a test that is evidence, and every mark names an existing cell.

Marks in `tests` are for the CPU. Features that no CPU has are tested on the simulated device, by the plugin's own
tests: their marks are compared with its matrix, with a level of at most E3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from every import every

from srv.args.config import ARGUMENTS
from srv.platform.probe import probe
from srv.platform.registry import find_platforms
from srv_cpu.ops import OPS
from srv_matrix.evidence import collect_marks, faults, from_line, marked_files, to_line
from srv_matrix.inventory import read as read_inventory
from srv_matrix.matrix import Matrix, make_matrix
from srv_matrix.records import Evidence, Level
from srv_matrix.repository import Repository

ROOT = Path(__file__).resolve().parents[2]
Marks = Mapping[str, Mapping[str, Any]]


def _marks(folder: str) -> Marks:
    """All marks of a folder of this checkout, as pytest collects them."""
    return collect_marks(Repository(ROOT), marked_files(Repository(ROOT), folder))


def _shown(marks: Marks, platform: str, max_level: Level) -> Matrix:
    """The platform's matrix as if every marked test had passed on this machine."""
    found = find_platforms()[platform]
    device = probe(found).device
    assert device is not None
    passed = [
        Evidence(tuple(mark["covers"]), platform, mark["variant"] or device.variant,
                 min(Level[mark["level"]], max_level), test, "passed",
                 "c", "p", "", "d", "2026-01-01", device.variant, mark["note"])
        for test, mark in marks.items() if mark["platform"] in ("", platform)
    ]  # fmt: skip
    assert [from_line(to_line(each)) for each in passed] == passed
    return make_matrix([found.loaded], evidence=passed, inventory=read_inventory(Repository(ROOT).inventory))


@pytest.fixture(scope="module")
def marks() -> Marks:
    return _marks("tests")


@pytest.fixture(scope="module")
def simulated_marks() -> Marks:
    return _marks("plugins/toy_device/tests")


@pytest.fixture(scope="module")
def shown(marks: Marks) -> Matrix:
    return _shown(marks, "cpu", Level.E5)


@pytest.fixture(scope="module")
def shown_simulated(simulated_marks: Marks) -> Matrix:
    return _shown(simulated_marks, "toy", Level.E3)


def _covered(marks: Marks) -> set[str]:
    """The arguments that marked tests cover."""
    return {cell.partition("=")[0] for mark in marks.values() for cell in mark["covers"]} & ARGUMENTS.keys()


def _works(name: str, shown: Matrix, platform: str) -> bool:
    """Whether the platform supports an argument."""
    cell = shown.cell(name, platform, shown.evidence[0].variant)
    return cell is not None and cell.status.works


def test_every_implemented_argument_has_evidence(
    marks: Marks, simulated_marks: Marks, shown: Matrix, shown_simulated: Matrix
) -> None:
    """On the CPU, or on the simulated device if the CPU does not support it."""
    implemented = {name for name, argument in ARGUMENTS.items() if argument.status == "implemented"}
    missing = implemented - _covered(marks)
    assert {name for name in missing if _works(name, shown, "cpu")} == set()
    assert {name for name in missing if not _works(name, shown_simulated, "toy")} == set()
    assert missing - _covered(simulated_marks) == set()


def test_no_planned_argument_has_evidence(marks: Marks, simulated_marks: Marks) -> None:
    covered = _covered(marks) | _covered(simulated_marks)
    assert {name for name in covered if ARGUMENTS[name].arg.planned} == set()


@every("platform", ["cpu", "toy"])
def test_every_mark_names_a_cell_that_works(
    platform: str, marks: Marks, simulated_marks: Marks, shown: Matrix, shown_simulated: Matrix
) -> None:
    matrix, marked = {"cpu": (shown, marks), "toy": (shown_simulated, simulated_marks)}[platform]
    assert {mark["platform"] for mark in marked.values()} <= {"", platform}
    for test, mark in marked.items():
        for name in mark["covers"]:
            cell = matrix.cell(name, platform, mark["variant"] or matrix.evidence[0].machine)
            assert cell is not None, f"{test} covers {name}, which is not a cell"
            assert cell.status.works, f"{test} covers {name}, which is {cell.status.value}"
            assert not cell.by_values, f"{test} covers {name}: name one of its values"


def test_simulated_cells_are_never_verified(simulated_marks: Marks, shown_simulated: Matrix) -> None:
    device = shown_simulated.evidence[0].variant
    cells = [shown_simulated.cell(name, "toy", device) for mark in simulated_marks.values() for name in mark["covers"]]
    assert cells
    assert [cell.feature for cell in cells if cell is not None and cell.verified] == []


def test_cells_that_all_marks_verify(shown: Matrix) -> None:
    """If all tests pass, every supported argument except one is verified, and every endpoint, op and model."""
    device = shown.evidence[0].machine
    unverified = [
        name
        for name, argument in ARGUMENTS.items()
        if argument.status == "implemented" and _works(name, shown, "cpu") and not _verified(shown, name, device)
    ]
    assert unverified == ["mem_fraction_static"]  # its smallest value is below the memory of the runtime
    kinds = (
        *shown.of_kind("endpoint"),
        *shown.of_kind("op"),
        *shown.of_kind("model"),
    )
    assert [name for name in kinds if not _verified(shown, name, device)] == []


def test_evidence_of_the_marks_has_no_faults(marks: Marks, shown: Matrix) -> None:
    cells = [key for key, record in shown.records.items() if not record.by_values]
    assert faults(shown.evidence, cells, marks, lambda _: True) == []


def test_forced_paths_have_a_note(marks: Marks, shown: Matrix) -> None:
    forced = {test: mark for test, mark in marks.items() if mark["variant"]}
    assert {mark["note"] for mark in forced.values()} == {"forced path"}
    assert {mark["variant"] for mark in forced.values()} == {"avx2"}
    cells = {cell for mark in forced.values() for cell in mark["covers"]}
    native = {impl.op for impl in OPS if impl.name == "native"}
    assert cells == {f"op:{op}/{dtype}" for op in native for dtype in ("float32", "bfloat16")}
    assert [cell for cell in cells if not _verified(shown, cell, "avx2")] == []


def _verified(shown: Matrix, name: str, variant: str) -> bool:
    cell = shown.cell(name, "cpu", variant)
    return cell is not None and cell.verified
