"""The live platform of Intel GPUs, in a worker."""

from __future__ import annotations

import importlib
import logging

from srv.platform.host import minor
from srv.platform.manifest import EngineContext
from srv_gpu.accelerator import load_accelerator
from srv_gpu.platform import GpuPlatform
from srv_xpu.facts import EXTENSION, FACTS

logger = logging.getLogger(__name__)


def create(context: EngineContext) -> GpuPlatform:
    """Raises PlatformUnavailable if torch cannot use such devices."""
    accelerator = load_accelerator("xpu")
    _load_extension(context)
    return GpuPlatform(
        context,
        accelerator,
        specs=FACTS.ops,
        visible_devices="ZE_AFFINITY_MASK",
        collectives="xccl",
        has_graphs=False,
    )


def _load_extension(context: EngineContext) -> None:
    """Import intel-extension-for-pytorch if it is made for this torch: it replaces operators of torch by its own.

    It is never required. (No Intel GPU has run this yet.)
    """
    installed = context.device.versions
    if EXTENSION not in installed or minor(installed[EXTENSION]) != minor(installed.get("torch", "")):
        return
    try:
        importlib.import_module("intel_extension_for_pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("%s %s cannot be loaded, and is not used: %s", EXTENSION, installed[EXTENSION], error)
