"""Every implemented argument has a test that is evidence, and every mark names a cell that there is.

Marks below `tests` are the CPU's. What no processor can do (graphs) is shown on the simulated device, by that
plugin's own tests: their marks are held against its matrix, and come to no more than "simulated".
"""

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


def _marks(folder: str) -> Marks:
    """All marks of a folder of this checkout, as pytest collects them."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        if "import covers" in path.read_text(encoding="utf-8") and path.name != WRITES_MARKS_OF_ITS_OWN
    ]
    return collect_marks(Repository(ROOT), files)


def _shown(marks: Marks, platform: str, most: Level) -> Matrix:
    """The platform's matrix as it would be if every marked test had passed on this machine."""
    found = find_platforms()[platform]
    device = probe(found).device
    assert device is not None
    passed = [
        Evidence(tuple(mark["covers"]), platform, device.variant, min(Level[mark["level"]], most), test, "passed",
                 "c", "p", "", "d", "2026-01-01")
        for test, mark in marks.items()
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
    """Arguments that marked tests cover."""
    return {cell.partition("=")[0] for mark in marks.values() for cell in mark["covers"]} & ARGUMENTS.keys()


def _there(name: str, shown: Matrix, platform: str) -> bool:
    """Whether the platform has what an argument is about."""
    cell = shown.cell(name, platform, shown.evidence[0].variant)
    return cell is not None and cell.status.works


def test_every_implemented_argument_has_evidence(
    marks: Marks, simulated_marks: Marks, shown: Matrix, shown_simulated: Matrix
) -> None:
    """On the CPU; and simulated, what the CPU has not."""
    implemented = {name for name, argument in ARGUMENTS.items() if argument.status == "implemented"}
    missing = implemented - _covered(marks)
    assert {name for name in missing if _there(name, shown, "cpu")} == set()
    assert {name for name in missing if not _there(name, shown_simulated, "toy")} == set()
    assert missing - _covered(simulated_marks) == set()


def test_no_planned_argument_has_any(marks: Marks, simulated_marks: Marks) -> None:
    covered = _covered(marks) | _covered(simulated_marks)
    assert {name for name in covered if ARGUMENTS[name].arg.planned} == set()


@pytest.mark.parametrize("platform", ["cpu", "toy"])
def test_every_mark_names_a_cell_that_works(
    platform: str, marks: Marks, simulated_marks: Marks, shown: Matrix, shown_simulated: Matrix
) -> None:
    matrix, marked = {"cpu": (shown, marks), "toy": (shown_simulated, simulated_marks)}[platform]
    device = matrix.evidence[0].variant
    for test, mark in marked.items():
        for name in mark["covers"]:
            cell = matrix.cell(name, platform, device)
            assert cell is not None, f"{test} covers {name}, which is no cell"
            assert cell.status.works, f"{test} covers {name}, which is {cell.status.value}"
            assert not cell.by_values, f"{test} covers {name}: name one of its values"


def test_what_is_simulated_is_never_verified(simulated_marks: Marks, shown_simulated: Matrix) -> None:
    device = shown_simulated.evidence[0].variant
    cells = [shown_simulated.cell(name, "toy", device) for mark in simulated_marks.values() for name in mark["covers"]]
    assert cells
    assert [cell.feature for cell in cells if cell is not None and cell.verified] == []


def test_what_the_marks_come_to(shown: Matrix) -> None:
    """With all of them passed, each endpoint is verified, and every implemented argument that works but for one."""
    device = shown.evidence[0].variant
    bare = [
        name
        for name, argument in ARGUMENTS.items()
        if argument.status == "implemented" and _there(name, shown, "cpu") and not _verified(shown, name, device)
    ]
    assert bare == ["mem_fraction_static"]  # its least value asks for less than the runtime itself takes
    kinds = (*shown.of_kind("endpoint"), *(name for name in shown.of_kind("model") if name.endswith("/safetensors")))
    assert [name for name in kinds if not _verified(shown, name, device)] == []


def _verified(shown: Matrix, name: str, variant: str) -> bool:
    cell = shown.cell(name, "cpu", variant)
    return cell is not None and cell.verified
