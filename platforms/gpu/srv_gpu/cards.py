"""The GPUs of one vendor on the PCI bus, compared with the driver and the build of torch. Torch-free, for probes.

card   driver   torch                 result
yes    yes      built for the card    none: the platform's probe goes on
yes    yes      built for another     "there is an AMD GPU (...), but torch is built for CUDA 12.8, not for ROCm"
yes    no       any                   the missing driver, and a wrong torch
no     no       any                   no card
no     yes      built for another     only graphics of the processor, if the bus lists them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from srv.platform.facts import DeviceFacts
from srv.platform.manifest import ProbeResult
from srv.platform.pci import ROOT, PciCard, cards

Build = Mapping[str, str | None]  # see `srv.platform.host.torch_build`

_BUILDS = {"hip": "ROCm", "cuda": "CUDA", "xpu": "XPU"}
_GET_TORCH = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a platform cannot be used: see `ProbeResult`."""

    reason: str
    remedy: str
    code: str


@dataclass(frozen=True, slots=True)
class Vendor:
    """A maker of GPUs. vendor: its PCI id. build: the name in `torch/version.py` that is set in a torch for its GPUs.

    integrated(product): whether a PCI id is the graphics of a processor, which srv does not use.
    """

    name: str
    vendor: int
    build: str
    integrated: Callable[[int], bool]

    def find(self, root: Path = ROOT) -> Cards:
        all_cards = cards(self.vendor, root)
        integrated = tuple(card for card in all_cards if self.integrated(card.product))
        return Cards(self, tuple(card for card in all_cards if card not in integrated), integrated)

    def built_for(self, build: Build) -> str | None:
        """The release of this vendor's toolkit that torch is built for; None for another vendor's, or for CPUs."""
        return build.get(self.build) if _kind(build) == self.build else None

    def wrong_torch(self, build: Build) -> Fault:
        """The fault of a torch that is built for another vendor's GPUs, or for CPUs."""
        device_name = _BUILDS[self.build]
        reason = f"the installed torch is built for {built_for(build)}, not for {device_name}"
        remedy = f"Uninstall that torch, and install one built for {device_name} ({_GET_TORCH})"
        return Fault(reason, remedy, f"torch_without_{device_name.lower()}")


@dataclass(frozen=True, slots=True)
class Cards:
    """The GPUs of a vendor that the bus lists: cards, and the graphics of processors."""

    vendor: Vendor
    discrete: tuple[PciCard, ...]
    integrated: tuple[PciCard, ...]

    @property
    def present(self) -> tuple[str, ...]:
        """See `ProbeResult.present`."""
        return tuple(f"{self.vendor.name} GPU {card}" for card in self.discrete)

    @property
    def integrated_note(self) -> str:
        """Says that graphics of the processor were found, which srv does not take for a card; empty without."""
        if not self.integrated:
            return ""
        names = ", ".join(map(str, self.integrated))
        return f"{self.vendor.name} graphics of the processor ({names}) are no accelerator, and are not used"

    def only_integrated(self, device: DeviceFacts | None = None) -> ProbeResult:
        """The refusal of graphics of the processor. device: what torch sees of them."""
        reason = f"{self.integrated_note}, and there is no other {self.vendor.name} GPU"
        return ProbeResult(False, reason, "Serve on the processor: --device cpu", "integrated_graphics", device)

    def refusal(self, build: Build, driver: Fault | None) -> ProbeResult | None:
        """Why the platform cannot be used; None if nothing is known to be missing.

        driver: what is wrong with the driver. A machine may hide the bus, so that a missing card alone is no reason.
        """
        torch = None if self.vendor.built_for(build) is not None else self.vendor.wrong_torch(build)
        faults = [fault for fault in (torch, driver) if fault is not None]
        if not faults:
            return None
        if not self.discrete and driver is not None:
            where = f"the PCI bus lists no {self.vendor.name} GPU"
            reasons = [where, driver.reason, *filter(None, [self.integrated_note])]
            return ProbeResult(False, "; ".join(reasons), driver.remedy, driver.code)
        if self.integrated and not self.discrete:
            return self.only_integrated()
        names = ", ".join(map(str, self.discrete))
        there = f"there is an {self.vendor.name} GPU ({names}), but " if names else ""
        reason = there + "; ".join(fault.reason for fault in faults)
        remedy = ". ".join(fault.remedy for fault in faults)
        return ProbeResult(False, reason, remedy, faults[0].code, present=self.present)


def built_for(build: Build) -> str:
    """What a torch is built for: "CUDA 12.8", "ROCm 6.4", "CPUs only"."""
    kind = _kind(build)
    return "CPUs only" if kind is None else f"{_BUILDS[kind]} {build[kind]}"


def _kind(build: Build) -> str | None:
    """The name of the toolkit in `torch/version.py` that is set. A build for ROCm is never taken for one for CUDA."""
    return next((name for name in _BUILDS if build.get(name)), None)
