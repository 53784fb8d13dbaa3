"""The live platform of NVIDIA GPUs, in a worker."""

from __future__ import annotations

from srv.platform.manifest import EngineContext
from srv_cuda.facts import FACTS
from srv_gpu.accelerator import load_accelerator
from srv_gpu.platform import GpuPlatform


def create(context: EngineContext) -> GpuPlatform:
    """Raises PlatformUnavailable if torch cannot use such devices."""
    accelerator = load_accelerator("cuda")
    return GpuPlatform(
        context, accelerator, specs=FACTS.ops, visible_devices="CUDA_VISIBLE_DEVICES", collectives="nccl"
    )
