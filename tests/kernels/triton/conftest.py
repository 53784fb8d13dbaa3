"""Triton's kernels are tested in Triton's interpreter, which is slow, or on a GPU (`kernel_device`).

Each test file starts with `pytest.importorskip("triton", reason=...)`.
"""

from __future__ import annotations

import pytest
import torch
from kernel_device import kernel_device


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    target = kernel_device()
    assert target is not None, "no GPU here: set TRITON_INTERPRET=1"
    return target


@pytest.fixture
def interpreted(device: torch.device) -> None:
    """Skip a test of the interpreter where kernels are compiled."""
    if device.type != "cpu":
        pytest.skip("it is about Triton's interpreter: set TRITON_INTERPRET=1")
