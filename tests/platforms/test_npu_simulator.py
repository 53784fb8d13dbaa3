"""The NPU simulator's own tests, in a process of their own: registering a device with PyTorch cannot be undone."""

from __future__ import annotations

import pytest
from child_pytest import ROOT, passes

PLUGIN = ROOT / "plugins" / "npu_simulator"


@pytest.mark.slow
def test_the_npu_simulator_passes_its_own_tests() -> None:
    passes("--timeout=120", PLUGIN / "tests", environment={"PYTHONPATH": str(PLUGIN)})
