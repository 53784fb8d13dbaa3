"""Checks whether there is an Intel GPU, and a torch that was built for it.

Torch is imported only if both exist, in the probe's child process; it then describes the devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from srv.platform.facts import DeviceFacts
from srv.platform.host import torch_build, versions
from srv.platform.manifest import ProbeContext, ProbeResult
from srv_gpu.probe import simulated_probe
from srv_xpu.facts import PROFILES

_ROOT = Path("/")
_INTEL = 0x8086
_PVC = range(0x0BD0, 0x0BE6)  # Data Center GPU Max
_BMG = range(0xE200, 0xE300)  # Arc B series


def probe(context: ProbeContext) -> ProbeResult:
    """Intel GPUs of this machine, or the simulated one that the environment asks for."""
    simulated = simulated_probe("xpu", PROFILES, {})
    if simulated is not None:
        return simulated
    variants = sorted(gpus(_ROOT))
    missing = missing_requirement(_ROOT, variants, torch_build().get("xpu"))
    if missing is not None:
        return missing
    try:
        device = _query_torch(variants[0])
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "Install Intel's GPU driver (Level Zero) and check it with clinfo or xpu-smi"
        return ProbeResult(False, f"torch cannot use the Intel GPU: {error}", remedy, "driver_failed")
    if device is None:
        remedy = "Check ZE_AFFINITY_MASK, and check the driver (Level Zero) with clinfo or xpu-smi"
        return ProbeResult(False, "torch sees no Intel GPU", remedy, "no_device")
    return ProbeResult(True, device=device)


def missing_requirement(root: Path, variants: list[str], built_for: str | None) -> ProbeResult | None:
    """The refusal if something is missing that torch needs. `built_for`: torch's XPU release, None without XPU."""
    if not any((root / "dev/dri").glob("renderD*")):
        remedy = "Install Intel's GPU driver (i915 or xe); in a container, pass /dev/dri"
        return ProbeResult(False, "no GPU driver: /dev/dri/renderD* does not exist", remedy, "driver_missing")
    if not variants:
        remedy = "This platform supports Data Center GPU Max (pvc) and Arc B series (bmg)"
        return ProbeResult(False, "there is no Intel GPU of a supported generation", remedy, "no_device")
    if built_for is None:
        remedy = "Install a torch built for XPU (https://pytorch.org/get-started/locally)"
        return ProbeResult(False, "the installed torch was built without XPU", remedy, "torch_without_xpu")
    return None


def gpus(root: Path) -> Iterator[str]:
    """The variant of each Intel GPU that the Linux kernel lists, by its PCI ids."""
    for node in sorted((root / "sys/class/drm").glob("renderD*")):
        if _identifier(node / "device/vendor") != _INTEL:
            continue
        product = _identifier(node / "device/device")
        if product in _PVC:
            yield "pvc"
        elif product in _BMG:
            yield "bmg"


def _identifier(path: Path) -> int:
    try:
        return int(path.read_text().strip(), 16)
    except (OSError, ValueError):
        return -1


def _query_torch(variant: str) -> DeviceFacts | None:
    import torch

    if not torch.xpu.is_available():
        return None
    first = torch.xpu.get_device_properties(0)
    found = versions("torch", "triton", "pytorch-triton-xpu")
    return DeviceFacts(variant, first.total_memory, torch.xpu.device_count(), first.name, found)
