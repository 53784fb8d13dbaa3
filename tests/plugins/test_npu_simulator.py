"""Run the NPU simulator's tests in a child process, because registering a device with PyTorch cannot be undone."""

from __future__ import annotations

import pytest
from child_pytest import ROOT, run

PLUGIN = ROOT / "plugins" / "npu_simulator"


@pytest.mark.slow
def test_the_npu_simulator_passes_its_own_tests() -> None:
    outcome = run("--timeout=120", PLUGIN / "tests", environment={"PYTHONPATH": str(PLUGIN)})
    assert outcome.passed, outcome.end
