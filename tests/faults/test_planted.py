"""The planted faults of each area are caught (`make test-faults` plants them all, with more to choose from)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
COPYING_MIN, FAULT_MIN = 0.5, 0.12  # a copy of the tree with the tests of the area, and a fault


def areas() -> dict[str, int]:
    """The number of faults in each area, counted in the text of its module: the names of these are too general to
    import them beside other tests."""
    counts = {
        path.stem: len(re.findall(r"^    Fault\($", path.read_text(), re.MULTILINE)) for path in HERE.glob("*.py")
    }
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    "area",
    [pytest.param(name, marks=pytest.mark.proof(minutes=COPYING_MIN + FAULT_MIN * n)) for name, n in areas().items()],
)
@pytest.mark.timeout(1800)
def test_the_faults_of_an_area_are_caught(area: str) -> None:
    command = [sys.executable, str(HERE / "plant.py"), "--area", area, "-j", "1"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
