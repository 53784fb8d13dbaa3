"""Triton's kernels are tested on a GPU if there is one, and otherwise in Triton's interpreter, which is slow.

Each test file starts with `pytest.importorskip("triton", reason=...)`.
"""

from __future__ import annotations

import os

import pytest
import torch

# Before the first import of triton, which reads it.
if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


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
