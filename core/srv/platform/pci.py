"""Graphics cards and accelerators on the PCI bus, as the Linux kernel lists them, for probes. Torch-free.

The bus lists a card whether its driver is installed or not, so that a probe can tell a missing card from a missing
driver, and can compare the card with the build of torch. Must not know any vendor.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
DISPLAY = 0x03
ACCELERATOR = 0x12
"""Base classes of PCI devices: display controllers, and processing accelerators."""


class PciCard(NamedTuple):
    """One function of a PCI device. address: "0000:03:00.0". base_class: the highest byte of its class code."""

    address: str
    vendor: int
    product: int
    base_class: int

    def __str__(self) -> str:
        return f"{self.vendor:04x}:{self.product:04x} at {self.address}"


def cards(vendor: int, root: Path = ROOT, classes: tuple[int, ...] = (DISPLAY, ACCELERATOR)) -> tuple[PciCard, ...]:
    """The cards of a vendor, in the order of their addresses; none where the kernel does not list the bus.

    root: the folder that has `sys`, for tests.
    """
    found_cards: list[PciCard] = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        card = PciCard(
            folder.name, _number(folder / "vendor"), _number(folder / "device"), _number(folder / "class") >> 16
        )
        if card.vendor == vendor and card.product >= 0 and card.base_class in classes:
            found_cards.append(card)
    return tuple(found_cards)


def _number(file: Path) -> int:
    """The hexadecimal number in a file; -1 if it cannot be read."""
    try:
        return int(file.read_text(encoding="ascii"), 16)
    except (OSError, ValueError):
        return -1
