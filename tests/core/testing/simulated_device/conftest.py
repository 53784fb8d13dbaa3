"""These tests register a device with PyTorch, which cannot be undone, so they need their own process.

They are collected only if tests/core/testing/test_simulated_device.py starts a process for them, or manually with

    SRV_SIMULATED_DEVICE_TESTS=1 python -m pytest tests/core/testing/simulated_device
"""

from __future__ import annotations

import os

import pytest
import torch

from srv.testing.simulated_device import SimulatedAccelerator, install

CAPACITY = 64 << 20

collect_ignore_glob = [] if "SRV_SIMULATED_DEVICE_TESTS" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def sim() -> SimulatedAccelerator:
    torch.set_num_threads(1)
    return install("sim", SimulatedAccelerator, lambda: SimulatedAccelerator("sim", CAPACITY))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
