"""The GPUs that can be simulated, as data. It imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_GIB = 1 << 30
_MIB = 1 << 20
_KIB = 1 << 10

Vendor = Literal["nvidia", "amd", "intel"]


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. Sizes are bytes, of memory as the vendor states it (a driver reports slightly less).

    capability: (major, minor), for AMD the digits of the architecture; Intel GPUs have none. processors: SMs, compute
    units (workgroup processors on RDNA) or Xe cores. warp: threads per warp, wavefront or sub-group. shared_memory: the
    most that one block can use.
    """

    key: str
    name: str
    vendor: Vendor
    memory: int
    processors: int
    warp: int
    l2_cache: int
    shared_memory: int
    capability: tuple[int, int] = (0, 0)

    @property
    def device_name(self) -> str:
        """The real card's name, marked as simulated."""
        return f"{self.name} (simulated)"


def _nvidia(key: str, name: str, memory: int, processors: int, l2_cache: int, shared_memory: int) -> Card:
    digits = key.removeprefix("sm")
    capability = (int(digits[:-1]), int(digits[-1]))
    return Card(key, name, "nvidia", memory * _GIB, processors, 32, l2_cache * _MIB, shared_memory * _KIB, capability)


def _amd(key: str, name: str, memory: int, processors: int, warp: int, l2_cache: int, shared_memory: int) -> Card:
    digits = key.removeprefix("gfx")
    capability = (int(digits[:-2]), int(digits[-2], 16))
    return Card(key, name, "amd", memory * _GIB, processors, warp, l2_cache * _MIB, shared_memory * _KIB, capability)


def _intel(key: str, name: str, memory: int, processors: int, l2_cache: int) -> Card:
    return Card(key, name, "intel", memory * _GIB, processors, 32, l2_cache * _MIB, 128 * _KIB)


CARDS = {
    card.key: card
    for card in (
        _nvidia("sm80", "NVIDIA A100-SXM4-80GB", 80, 108, 40, 163),
        _nvidia("sm86", "NVIDIA GeForce RTX 3090", 24, 82, 6, 99),
        _nvidia("sm89", "NVIDIA GeForce RTX 4090", 24, 128, 72, 99),
        _nvidia("sm90", "NVIDIA H100 80GB HBM3", 80, 132, 50, 227),
        _nvidia("sm100", "NVIDIA B200", 180, 148, 126, 227),
        _nvidia("sm120", "NVIDIA GeForce RTX 5090", 32, 170, 96, 99),
        _amd("gfx942", "AMD Instinct MI300X", 192, 304, 64, 4, 64),
        _amd("gfx950", "AMD Instinct MI355X", 288, 256, 64, 4, 160),
        _amd("gfx1100", "AMD Radeon RX 7900 XTX", 24, 48, 32, 6, 64),
        _intel("pvc", "Intel(R) Data Center GPU Max 1550", 64, 64, 204),
        _intel("bmg", "Intel(R) Arc(TM) B580 Graphics", 12, 20, 18),
    )
}


def find_card(key: str) -> Card:
    """The GPU with this key. Raises ValueError, with the known keys, for another."""
    if key not in CARDS:
        raise ValueError(f"the GPU simulator knows no GPU {key!r}; it simulates {', '.join(CARDS)}")
    return CARDS[key]
