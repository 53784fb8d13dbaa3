"""The device is registered once for the whole process, and for good: run this folder in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import srv_gpu_simulator

sys.path.append(str(Path(__file__).parent))  # for paged_case


@pytest.fixture(scope="session")
def gpu() -> Any:
    """The simulated sm90 GPU."""
    torch.set_num_threads(1)
    return srv_gpu_simulator.load("sm90")


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
    torch.manual_seed(0)
