"""Run the tests of `srv.testing.simulated_device` in a separate process, and test what its registration refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from child_pytest import ROOT, run

TESTS = ROOT / "tests" / "core" / "testing" / "simulated_device"
MAKE = """
import torch
from srv.testing.simulated_device import SimulatedAccelerator, install

def make(name="sim", kind=SimulatedAccelerator, **options):
    return install(name, kind, lambda: kind(name, 1 << 20, **options))
"""


@pytest.mark.slow
def test_the_simulated_device_passes_its_tests() -> None:
    outcome = run("--timeout=120", TESTS, environment={"SRV_SIMULATED_DEVICE_TESTS": "1"})
    assert outcome.passed, outcome.end


def python(code: str) -> str:
    """The output of the code; the last line is the text of its exception, if any."""
    command = [sys.executable, "-c", MAKE + code]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return (process.stdout + process.stderr).strip()


def test_a_process_has_one_device_under_one_name() -> None:
    text = python("first = make()\nprint(make() is first is torch.sim, first.get_device_name())\nmake('other')")
    assert text.startswith("True sim (simulated)")
    assert "RuntimeError: other (simulated) cannot be loaded: PyTorch's one PrivateUse1 backend is 'sim'" in text


@pytest.mark.parametrize("first", ["make()", "torch.utils.rename_privateuse1_backend('sim'); torch.sim = object()"])
def test_what_is_there_under_the_name_must_be_of_the_kind(first: str) -> None:
    text = python(f"{first}\nclass Mine(SimulatedAccelerator): ...\nmake(kind=Mine)")
    assert text.endswith(
        "RuntimeError: sim (simulated) cannot be loaded: torch.sim is there already, from another backend. "
        "Load it in a process of its own."
    )


def test_it_brings_operators_of_its_own() -> None:
    code = """
make(operators={"double(Tensor x) -> Tensor": lambda x: x * 2})
doubled = torch.ops.sim.double(torch.ones(2, device="sim"))
print(doubled.device, doubled.tolist(), torch.ops.sim.double(torch.ones(1)).tolist())
torch.ops.sim.double(torch.ones(1, device="meta"))
"""
    text = python(code)
    assert text.startswith("sim:0 [2.0, 2.0] [2.0]\n")
    assert "NotImplementedError" in text


def test_a_process_uses_the_one_of_several_devices_that_it_selects() -> None:
    text = python(
        "sim = make(devices=3)\n"
        "sim.set_device('sim:2')\n"
        "ones = torch.ones(2, 3, dtype=torch.bfloat16)\n"
        "x = ones.to('sim:2') @ torch.ones(3, 2, dtype=torch.bfloat16, device='sim')\n"
        "print(sim.device_count(), sim.current_device(), x.device, x.t()[0].device, x.tolist())\n"
        "for asked in (0, 3):\n"
        "    try: sim.set_device(asked)\n"
        "    except RuntimeError as error: print(error)\n"
        "torch.empty(1, device='sim:1')\n"
    )
    lines = text.splitlines()
    assert lines[0] == "3 2 sim:2 sim:2 [[3.0, 3.0], [3.0, 3.0]]"
    assert lines[1] == "sim:0 was asked for, but this process has used sim:2: it simulates one device"
    assert lines[2] == "invalid device ordinal: sim:3 was asked for, but there are 3"
    assert lines[-1].endswith("sim:1 was asked for, but this process has one device, sim:2")
