"""Checks whether there is an AMD GPU with the ROCm kernel driver, and a torch that was built for it.

Torch is imported only if both exist, in the probe's child process; it then describes the devices.
"""

from __future__ import annotations

import os
from pathlib import Path

from srv.platform.facts import DeviceFacts
from srv.platform.host import torch_build, versions
from srv.platform.manifest import ProbeContext, ProbeResult
from srv_gpu.probe import simulated_probe
from srv_rocm.facts import PROFILES, STAND_INS, VARIANTS

_DRIVER = Path("/dev/kfd")


def probe(context: ProbeContext) -> ProbeResult:
    """AMD GPUs of this machine, or the simulated one that the environment asks for."""
    simulated = simulated_probe("rocm", PROFILES, STAND_INS)
    if simulated is not None:
        return simulated
    missing = missing_requirement(_DRIVER, torch_build().get("hip"))
    if missing is not None:
        return missing
    try:
        device = _query_torch()
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "Check the driver with rocminfo, and that torch was built for the installed ROCm release"
        return ProbeResult(False, f"torch cannot use the AMD GPU: {error}", remedy, "driver_failed")
    if device is None:
        remedy = "Check HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and the devices that rocminfo lists"
        return ProbeResult(False, "torch sees no AMD GPU", remedy, "no_device")
    notes = () if device.variant in VARIANTS else (f"{device.variant} is not supported ({', '.join(VARIANTS)})",)
    return ProbeResult(True, device=device, notes=notes)


def missing_requirement(driver: Path, built_for: str | None) -> ProbeResult | None:
    """The refusal if something is missing that torch needs. `built_for`: torch's ROCm release, None without ROCm."""
    if not driver.exists():
        remedy = "Install AMD's kernel driver (amdgpu with ROCm); in a container, pass /dev/kfd and /dev/dri"
        return ProbeResult(False, f"no ROCm driver: {driver} does not exist", remedy, "driver_missing")
    if not os.access(driver, os.R_OK | os.W_OK):
        remedy = "Add the user to the groups `render` and `video`, and log in again"
        return ProbeResult(False, f"this user has no permission to open {driver}", remedy, "driver_forbidden")
    if built_for is None:
        remedy = "Install a torch built for ROCm (https://pytorch.org/get-started/locally)"
        return ProbeResult(False, "the installed torch was built without ROCm", remedy, "torch_without_rocm")
    return None


def _query_torch() -> DeviceFacts | None:
    """The devices that torch sees, None without any. On ROCm too, torch's functions are in `torch.cuda`."""
    import torch

    if not torch.cuda.is_available():
        return None
    first = torch.cuda.get_device_properties(0)
    variant = first.gcnArchName.split(":")[0]
    found = versions("torch", "triton", "amd-aiter", "triton-kernels") | {"ROCm": str(torch.version.hip)}
    return DeviceFacts(variant, first.total_memory, torch.cuda.device_count(), first.name, found)
