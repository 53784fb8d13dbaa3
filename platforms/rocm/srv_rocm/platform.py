"""The live platform of AMD GPUs, in a worker."""

from __future__ import annotations

from srv.platform.manifest import EngineContext
from srv_gpu.accelerator import load_accelerator
from srv_gpu.platform import GpuPlatform
from srv_rocm.facts import FACTS


def create(context: EngineContext) -> GpuPlatform:
    """Raises PlatformUnavailable if torch cannot use such devices."""
    accelerator = load_accelerator("rocm")
    return GpuPlatform(context, accelerator, specs=FACTS.ops, visible_devices="HIP_VISIBLE_DEVICES", collectives="nccl")
