"""The device is registered permanently for the whole process, so these tests run in their own process.

If the session also collects tests of other folders, one child pytest runs all tests of this folder, and the results are
reported here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER))  # for paged_case
CHILD = "SRV_GPU_SIMULATOR_TESTS_CHILD"
RESULTS: pytest.StashKey[dict[tuple[str, str], str]] = pytest.StashKey()


def shares_process(session: pytest.Session) -> bool:
    """Whether tests of other folders run in this process too."""
    return CHILD not in os.environ and any(FOLDER not in item.path.parents for item in session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if FOLDER not in pyfuncitem.path.parents or not shares_process(pyfuncitem.session):
        return None
    stash = pyfuncitem.session.stash
    if RESULTS not in stash:
        stash[RESULTS] = run_child()
    failure = stash[RESULTS].get((pyfuncitem.path.stem, pyfuncitem.name), "the child process did not run this test")
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def run_child() -> dict[tuple[str, str], str]:
    """The failure message ("" if none) by file and test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(FOLDER)]
        environment = {
            **os.environ,
            CHILD: "1",
            "PYTEST_ADDOPTS": "",
            "PYTEST_XDIST_WORKER": "",
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
        }
        subprocess.run(command, env=environment, capture_output=True, timeout=280, check=False)
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {
            (case.get("classname", "").rpartition(".")[2], case.get("name", "")): "\n".join(
                one.text or one.get("message", "") for one in case if one.tag in ("failure", "error")
            )
            for case in cases
        }


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Iterator[object]:
    """The simulated sm90 GPU; None if a child process runs the tests."""
    if shares_process(request.session):
        yield None
        return
    import torch

    torch.set_num_threads(1)
    import srv_gpu_simulator

    yield srv_gpu_simulator.load("sm90")


@pytest.fixture
def deferred(gpu: Any) -> Iterator[Any]:
    """The same GPU in its asynchronous mode."""
    gpu.accelerator.synchronize()
    gpu.accelerator.deferral.enabled = True
    yield gpu
    gpu.accelerator.deferral.enabled = False
    gpu.accelerator.synchronize()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)
