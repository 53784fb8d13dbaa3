"""Tests of the NPU platform on a simulated device. It claims a device name of torch for the whole process, and for
good: run this folder in a process of its own, with SRV_NPU_SIMULATOR set (tests/platforms/npu/test_simulated.py does).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from srv.platform.interface import BackendContext
from srv.platform.manifest import EngineContext
from srv.platform.transfers import Transfers
from srv.specs import FullAttention, KVLayout
from srv_npu.facts import PROFILES
from srv_npu.limits import KV_ORDER, PAGE
from srv_npu.platform import NpuPlatform, create
from srv_npu.sdk import SIMULATOR_VARIABLE


@pytest.fixture(scope="session")
def platform() -> NpuPlatform:
    """The platform on the simulated device, ready to compute."""
    soc = os.environ.get(SIMULATOR_VARIABLE)
    assert soc, f"set {SIMULATOR_VARIABLE} to a2, a2-32g or a3, and let srv_npu_simulator be importable"
    torch.set_num_threads(1)
    device = replace(PROFILES["a3" if soc == "a3" else "a2"], simulated=True)
    started = create(EngineContext(device=device, local_rank=0))
    started.init_worker(0)
    return started


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def context(
    platform: NpuPlatform,
    *,
    dim: int = 64,
    value_dim: int | None = None,
    kv_heads: int = 2,
    pages: int = 40,
    dtype: str = "bfloat16",
    max_rows: int = 16,
) -> BackendContext:
    """What a backend is built from: a pool of one layer. Values are as long as keys unless `value_dim` says else."""
    layout = KVLayout(FullAttention((0,), kv_heads, dim, value_dim or dim), PAGE, dtype, KV_ORDER)
    kv = platform.kv_buffers(layout, pages)
    return BackendContext(platform, platform.device(0), kv, max_rows, Transfers(platform, platform.device(0)))
