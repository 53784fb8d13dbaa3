"""Run the GPU simulator's tests in a child process, because registering a device with PyTorch cannot be undone."""

from __future__ import annotations

import pytest
from child_pytest import ROOT, run

PLUGIN = ROOT / "plugins" / "gpu_simulator"


@pytest.mark.slow
def test_the_gpu_simulator_passes_its_own_tests() -> None:
    environment = {"PYTHONPATH": str(PLUGIN), "TRITON_INTERPRET": "1"}
    outcome = run("--timeout=120", PLUGIN / "tests", environment=environment)
    assert outcome.passed, outcome.end
