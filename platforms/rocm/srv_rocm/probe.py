"""Checks whether there is an AMD GPU with the ROCm kernel driver, and a torch that was built for it.

Torch is imported only if both exist, in the probe's child process; it then describes the devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from srv.platform.facts import DeviceFacts
from srv.platform.host import torch_build, versions
from srv.platform.manifest import ProbeContext, ProbeResult
from srv_gpu.cards import Build, Cards, Fault, Vendor
from srv_gpu.probe import simulated_probe
from srv_gpu.tools import aiter_tools, triton_version
from srv_rocm.facts import PROFILES, STAND_INS, VARIANTS

_DRIVER = Path("/dev/kfd")
# Graphics of Ryzen and Athlon processors, by the PCI ids of the amdgpu driver. (Instinct MI300A is an accelerator.)
_INTEGRATED = frozenset(
    {
        *(0x15DD, 0x15D8),  # Raven Ridge, Picasso
        *(0x1636, 0x1638, 0x164C, 0x15E7),  # Renoir, Cezanne, Lucienne, Barcelo
        *(0x163F, 0x1435, 0x164D, 0x1681, 0x1506),  # Van Gogh, Rembrandt, Mendocino
        *(0x164E, 0x13C0),  # Raphael, Granite Ridge
        *(0x15BF, 0x15C8, 0x1900, 0x1901),  # Phoenix, Hawk Point
        *(0x150E, 0x1114, 0x1586),  # Strix Point, Krackan Point, Strix Halo
    }
)
AMD = Vendor("AMD", 0x1002, "hip", integrated=_INTEGRATED.__contains__)


def probe(context: ProbeContext) -> ProbeResult:
    """AMD GPUs of this machine, or the simulated one that the environment asks for."""
    simulated = simulated_probe("rocm", PROFILES, STAND_INS)
    if simulated is not None:
        return simulated
    return examine(AMD.find(), torch_build(), missing_driver(_DRIVER), _query_torch)


def examine(cards: Cards, build: Build, driver: Fault | None, query: Callable[[], DeviceFacts | None]) -> ProbeResult:
    """The result for the cards on the bus, the build of torch, the driver, and the devices that torch sees."""
    refusal = cards.refusal(build, driver)
    if refusal is not None:
        return refusal
    try:
        device = query()
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "Check the driver with rocminfo, and that torch was built for the installed ROCm release"
        reason = f"torch cannot use the AMD GPU: {error}"
        return ProbeResult(False, reason, remedy, "driver_failed", present=cards.present)
    if device is None:
        remedy = "Check HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and the devices that rocminfo lists"
        return ProbeResult(False, "torch sees no AMD GPU", remedy, "no_device", present=cards.present)
    notes = [] if device.variant in VARIANTS else [f"{device.variant} is not supported ({', '.join(VARIANTS)})"]
    if cards.integrated:
        notes.append(f"{cards.integrated_note}: select the cards with HIP_VISIBLE_DEVICES if torch lists them first")
    if cards.integrated and not cards.discrete and device.variant not in VARIANTS:
        return cards.only_integrated(device)
    return ProbeResult(True, device=device, notes=tuple(notes), present=cards.present)


def missing_driver(driver: Path) -> Fault | None:
    """The fault if the kernel driver's device is missing, or may not be opened by this user."""
    if not driver.exists():
        remedy = "Install AMD's kernel driver (amdgpu with ROCm); in a container, pass /dev/kfd and /dev/dri"
        return Fault(f"no ROCm driver: {driver} does not exist", remedy, "driver_missing")
    if not os.access(driver, os.R_OK | os.W_OK):
        remedy = "Add the user to the groups `render` and `video`, and log in again"
        return Fault(f"this user has no permission to open {driver}", remedy, "driver_forbidden")
    return None


def _query_torch() -> DeviceFacts | None:
    """The devices that torch sees, None without any. On ROCm too, torch's functions are in `torch.cuda`."""
    import torch

    if not torch.cuda.is_available():
        return None
    first = torch.cuda.get_device_properties(0)
    variant = first.gcnArchName.split(":")[0]
    tool_versions = versions("torch") | {"ROCm": str(torch.version.hip)} | triton_version() | aiter_tools()
    others = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    equal = sum(other.gcnArchName == first.gcnArchName for other in others)  # not the processor's graphics
    return DeviceFacts(variant, first.total_memory, equal, first.name, tool_versions)
