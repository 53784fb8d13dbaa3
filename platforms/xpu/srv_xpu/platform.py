"""The live platform of Intel GPUs, in a worker."""

from __future__ import annotations

from srv.platform.manifest import EngineContext
from srv_gpu.accelerator import load_accelerator
from srv_gpu.platform import GpuPlatform


def create(context: EngineContext) -> GpuPlatform:
    """Raises PlatformUnavailable if torch cannot use such devices."""
    accelerator = load_accelerator("xpu")
    return GpuPlatform(context, accelerator, visible_devices="ZE_AFFINITY_MASK", collectives="xccl", has_graphs=False)
