"""The device is registered once for the whole process, and for good: run this folder in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import srv_npu_simulator


@pytest.fixture(scope="session")
def sdk() -> Any:
    """The simulated torch_npu."""
    torch.set_num_threads(1)
    return srv_npu_simulator.load("a2")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
