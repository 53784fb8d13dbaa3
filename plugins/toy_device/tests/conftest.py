"""The device is registered once for the whole process, and for good: run this folder in a process of its own."""

from __future__ import annotations

import os

import pytest
import torch

from srv_toy_device.device import Accelerator, install

CAPACITY = 64 << 20


@pytest.fixture(scope="session", autouse=True)
def toy() -> Accelerator:
    os.environ["SRV_TOY_MEMORY"] = str(CAPACITY)
    torch.set_num_threads(1)
    return install()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
