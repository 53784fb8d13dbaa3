"""Tests of the GPU platforms on a simulated device. It claims a device name of torch for the whole process, and for
good: run this folder in a process of its own, with SRV_GPU_SIMULATOR and TRITON_INTERPRET=1 set
(tests/platforms/gpu/test_simulated.py does).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from srv.dtypes import KVScales
from srv.platform.interface import BackendContext
from srv.platform.manifest import EngineContext, Manifest
from srv.platform.registry import find_platforms
from srv.platform.transfers import Transfers
from srv.specs import FullAttention, KVLayout
from srv_gpu.facts import KV_ORDER
from srv_gpu.platform import GpuPlatform
from srv_gpu.simulator import VARIABLE, VARIANTS


@pytest.fixture(scope="session")
def variant() -> str:
    name = os.environ.get(VARIABLE)
    assert name, f"set {VARIABLE} to the GPU to simulate, and let srv_gpu_simulator be importable"
    return name


@pytest.fixture(scope="session")
def manifest(variant: str) -> Manifest:
    name = next(name for name, variants in VARIANTS.items() if variant in variants)
    return find_platforms()[name].loaded


@pytest.fixture(scope="session")
def platform(manifest: Manifest) -> GpuPlatform:
    """The platform on the simulated device that its own probe describes, ready to compute."""
    from srv.platform.manifest import ProbeContext

    result = manifest.probe(ProbeContext(60))
    assert result.available, result.reason
    assert result.device is not None
    started = manifest.create(EngineContext(device=result.device, local_rank=0))
    started.init_worker(0)
    assert isinstance(started, GpuPlatform)
    return started


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def context(
    platform: GpuPlatform,
    *,
    dim: int = 64,
    dtype: str = "float32",
    page_size: int = 16,
    scales: tuple[KVScales, ...] = (),
    **arguments: int,
) -> BackendContext:
    """What a backend is built from: a pool of one layer with two KV heads and 40 pages. `arguments`: of the server."""
    layout = KVLayout(FullAttention((0,), 2, dim, dim), page_size, dtype, KV_ORDER, scales)
    device = platform.device(0)
    kv = platform.kv_buffers(layout, 40)
    return BackendContext(platform, device, kv, 16, Transfers(platform, device), arguments)
