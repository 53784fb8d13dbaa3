"""Triton's kernels are tested in Triton's interpreter, which is slow, or on a GPU (tests/conftest.py).

Each test file starts with `pytest.importorskip("triton", reason=...)`.
"""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator


@pytest.fixture
def interpreted(device: torch.device) -> None:
    """Skip a test of the interpreter where kernels are compiled."""
    if device.type != "cpu":
        pytest.skip("it is about Triton's interpreter: set TRITON_INTERPRET=1")
