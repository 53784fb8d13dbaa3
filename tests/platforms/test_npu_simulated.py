"""The NPU platform on simulated devices, in processes of their own: claiming torch's device npu cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "platforms" / "npu" / "tests"
SIMULATOR = ROOT / "plugins" / "npu_simulator"


def passes(soc: str, seconds: float, *arguments: str) -> None:
    """Run tests of the folder on a simulated device; all must pass, and there must be some."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SRV_")},
        "SRV_NPU_SIMULATOR": soc,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SIMULATOR), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "",
        "PYTEST_XDIST_WORKER": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def test_device_attention_and_sampling_on_a2() -> None:
    files = ("test_npu_on_device.py", "test_npu_attention.py", "test_npu_sampling.py")
    passes("a2", 280, *(str(TESTS / file) for file in files))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("soc", "chosen"),
    [
        ("a2", "demo-64"),
        ("a2", "random-128"),
        ("a3", "random-128"),
        ("a3", "demo-64 and greedy and graphs-float16"),
    ],
)
def test_the_engine_computes_what_the_cpu_computes(soc: str, chosen: str) -> None:
    """A minute or two each on an idle machine. The demo model takes the longest, so a3 runs a part of it: nothing that
    computes asks for the generation.
    """
    passes(soc, 1700, str(TESTS / "test_npu_engine.py"), "-k", chosen)


@pytest.mark.slow
@pytest.mark.parametrize("soc", ["a2-32g", "a3"])
def test_device_attention_and_sampling_on_other_cards(soc: str) -> None:
    files = ("test_npu_on_device.py", "test_npu_attention.py", "test_npu_sampling.py")
    passes(soc, 280, *(str(TESTS / file) for file in files))
