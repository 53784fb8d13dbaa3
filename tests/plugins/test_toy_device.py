"""Run the toy device's tests in a child process, because registering a device with PyTorch cannot be undone."""

from __future__ import annotations

import pytest
from child_pytest import ROOT, run


@pytest.mark.slow
def test_the_toy_device_passes_its_own_tests() -> None:
    outcome = run("--timeout=120", ROOT / "plugins" / "toy_device" / "tests")
    assert outcome.passed, outcome.end
