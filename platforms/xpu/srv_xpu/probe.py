"""Checks whether there is an Intel GPU, and a torch that was built for it.

Torch is imported only if both exist, in the probe's child process; it then describes the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from srv.platform.facts import DeviceFacts
from srv.platform.host import minor, torch_build, versions
from srv.platform.manifest import ProbeContext, ProbeResult
from srv_gpu.cards import Build, Cards, Fault, Vendor
from srv_gpu.probe import simulated_probe
from srv_gpu.tools import triton_version
from srv_xpu.facts import EXTENSION, PROFILES

_ROOT = Path("/")
_VARIANTS = {
    "pvc": (range(0x0BD0, 0x0BE6),),  # Data Center GPU Max
    "bmg": (range(0xE200, 0xE300),),  # Arc B series
}
# Cards of generations that srv has no kernels for. Every other GPU of Intel is the graphics of a processor.
_OTHER_CARDS = (
    range(0x4905, 0x490A),  # Iris Xe MAX (DG1)
    range(0x4F80, 0x4F89),  # Arc A series (DG2)
    range(0x5690, 0x56C3),  # Arc A series, Data Center GPU Flex
)


def variant_of(product: int) -> str | None:
    """The variant of a PCI id; None for other GPUs."""
    matches = (name for name, ranges in _VARIANTS.items() if any(product in product_range for product_range in ranges))
    return next(matches, None)


def _integrated(product: int) -> bool:
    return variant_of(product) is None and not any(product in card_name for card_name in _OTHER_CARDS)


INTEL = Vendor("Intel", 0x8086, "xpu", integrated=_integrated)


def probe(context: ProbeContext) -> ProbeResult:
    """Intel GPUs of this machine, or the simulated one that the environment asks for."""
    simulated = simulated_probe("xpu", PROFILES, {})
    if simulated is not None:
        return simulated
    return examine(INTEL.find(_ROOT), torch_build(), missing_driver(_ROOT), _query_torch)


def examine(
    cards: Cards, build: Build, driver: Fault | None, query: Callable[[str], DeviceFacts | None]
) -> ProbeResult:
    """The result for the cards on the bus, the build of torch, the driver, and the devices that torch sees."""
    variants = [variant for card in cards.discrete if (variant := variant_of(card.product)) is not None]
    if not variants and driver is None:
        present = f": {', '.join(cards.present)}" if cards.present else ""
        note = f"; {cards.integrated_note}" if cards.integrated else ""
        reason = f"there is no Intel GPU of a supported generation{present}{note}"
        remedy = "This platform supports Data Center GPU Max (pvc) and Arc B series (bmg)"
        return ProbeResult(False, reason, remedy, "no_device", present=cards.present)
    refusal = cards.refusal(build, driver)
    if refusal is not None:
        return refusal
    try:
        device = query(variants[0])
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "Install Intel's GPU driver (Level Zero) and check it with clinfo or xpu-smi"
        reason = f"torch cannot use the Intel GPU: {error}"
        return ProbeResult(False, reason, remedy, "driver_failed", present=cards.present)
    if device is None:
        remedy = "Check ZE_AFFINITY_MASK, and check the driver (Level Zero) with clinfo or xpu-smi"
        return ProbeResult(False, "torch sees no Intel GPU", remedy, "no_device", present=cards.present)
    notes = (*filter(None, [cards.integrated_note]), *extension_notes(device))
    return ProbeResult(True, device=device, notes=notes, present=cards.present)


def missing_driver(root: Path) -> Fault | None:
    """The fault if the kernel driver has made no device for computing."""
    if any((root / "dev/dri").glob("renderD*")):
        return None
    remedy = "Install Intel's GPU driver (i915 or xe); in a container, pass /dev/dri"
    return Fault("no GPU driver: /dev/dri/renderD* does not exist", remedy, "driver_missing")


def extension_notes(device: DeviceFacts) -> tuple[str, ...]:
    """What to know of intel-extension-for-pytorch, if it is installed.

    Its last release, 2.8, is for torch 2.8, and changes torch when it is imported; srv imports it on that stack only.
    """
    extension, torch = device.versions.get(EXTENSION), device.versions.get("torch", "")
    if extension is None:
        return ()
    if minor(extension) == minor(torch):
        text = f"{EXTENSION} {extension} fits torch {torch}, and is imported; torch 2.9 and later need none of it"
    else:
        text = (
            f"{EXTENSION} {extension} is for torch {minor(extension)}, and is not used with torch {torch}: uninstall it"
        )
    return (text,)


def _query_torch(variant: str) -> DeviceFacts | None:
    import torch

    if not torch.xpu.is_available():
        return None
    first = torch.xpu.get_device_properties(0)
    tool_versions = versions("torch", EXTENSION) | triton_version()
    return DeviceFacts(variant, first.total_memory, torch.xpu.device_count(), first.name, tool_versions)
