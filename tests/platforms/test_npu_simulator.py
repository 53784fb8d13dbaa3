"""The NPU simulator's own tests, in a process of their own: registering a device with PyTorch cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "plugins" / "npu_simulator"


@pytest.mark.slow
def test_the_npu_simulator_passes_its_own_tests() -> None:
    path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout=120", str(PLUGIN / "tests")],
        cwd=PLUGIN.parents[1],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "PYTEST_ADDOPTS": "",
            "PYTEST_XDIST_WORKER": "",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
