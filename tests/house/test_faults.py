"""The faults of tests/faults fit the tree, so that `make test-faults` can plant each of them and judges it rightly."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "faults"


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("plant")


def test_every_fault_fits_the_tree() -> None:
    """Its text occurs exactly once in its file, and its tests exist."""
    command = [sys.executable, str(FOLDER / "plant.py"), "--check"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, f"mend the tables in tests/faults:\n{process.stdout}{process.stderr}"


def test_a_stale_fault_is_reported_with_its_reason(plant: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n", encoding="utf-8")
    (tmp_path / "test_code.py").write_text("def test_a(): ...\n", encoding="utf-8")
    cases = [
        ("code.py", "a = 1", "a = 2", "test_code.py::test_a[one]", None),
        ("code.py", "= 1", "= 2", "test_code.py", "occurs 2 times"),
        ("code.py", "c = 1", "c = 2", "test_code.py", "occurs 0 times"),
        ("code.py", "a = 1", "a = ", "test_code.py", "not valid Python"),
        ("code.py", "a = 1", "a = 1", "test_code.py", "changes nothing"),
        ("code.py", "a = 1", "a = 2", "test_code.py::test_b", "has no test_b"),
        ("code.py", "a = 1", "a = 2", "test_other.py", "does not exist"),
        ("other.py", "a = 1", "a = 2", "test_code.py", "does not exist"),
    ]
    for file, text, planted, test, expected in cases:
        fault = plant.Fault(name="x", file=file, text=text, planted=planted, effect="y", tests=(test,))
        reason = fault.stale(tmp_path)
        assert reason is None if expected is None else expected in str(reason), (text, planted, test, reason)


def test_only_a_failed_test_counts_as_caught(plant: ModuleType) -> None:
    """A run that was killed counts too, if the fault is known to make the tests hang."""
    cases = [
        (1, ("test_a.py::test_a",), False, "caught", "caught"),
        (0, (), False, "ESCAPED", "ESCAPED"),
        (1, ("test_a.py::test_a",), True, "HUNG", "caught"),
        (None, (), False, "HUNG", "caught"),
        (2, ("test_a.py",), False, "BROKEN", "BROKEN"),
        (5, (), False, "BROKEN", "BROKEN"),
    ]
    for status, failed, timed_out, verdict, verdict_if_it_hangs in cases:
        run = plant.Run(status, failed, timed_out, "", 1.0)
        for hangs, expected in ((False, verdict), (True, verdict_if_it_hangs)):
            fault = plant.Fault(name="x", file="a", text="b", planted="c", effect="d", tests=("e",), hangs=hangs)
            assert plant.judge(fault, run).verdict == expected, (status, failed, timed_out, hangs)
