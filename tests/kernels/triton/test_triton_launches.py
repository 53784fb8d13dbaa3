"""Which operators and kernels a process launches is recorded in the file that a variable names, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'srv-kernels[triton]'")

from srv_kernels.triton.launches import VARIABLE, launched, recorded

SCRIPT = """
import os, signal, torch
import srv_kernels.triton.activations, srv_kernels.triton.norms
for rows in (1, 2):
    torch.ops.srv_triton.silu_and_mul(torch.ones(rows, 8))
torch.ops.srv_triton.gelu_tanh_and_mul(torch.ones(0, 8))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_has_recorded_what_it_launched(tmp_path: Path) -> None:
    """An operator on an empty tensor launches no kernel, and each name is written once."""
    file = tmp_path / "launches"
    file.write_text("kernel _rms_norm\n")  # of another process
    environment = {**os.environ, VARIABLE: str(file), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=False, timeout=120)
    assert launched(file) == ({"silu_and_mul", "gelu_tanh_and_mul"}, {"_rms_norm", "_gated"})
    assert file.read_text().count("silu_and_mul") == 1


def test_without_the_variable_the_function_itself_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert recorded("silu_and_mul", launched) is launched
