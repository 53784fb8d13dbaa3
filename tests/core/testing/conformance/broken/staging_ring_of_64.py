"""Staging memory of one shape is returned again after 64 calls, while a copy may still use it.

Caught by copies.staging at L1, naming "share memory".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv_toy_device.device import Accelerator
    from srv_toy_device.platform import ToyPlatform

SLOTS = 64


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Ring(toy):  # type: ignore[valid-type, misc]
        def __init__(self, accelerator: Accelerator) -> None:
            super().__init__(accelerator)
            self._made: dict[object, list[torch.Tensor]] = {}

        def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            ring = self._made.setdefault((shape, dtype), [])
            ring.append(super().staging(shape, dtype) if len(ring) < SLOTS else ring.pop(0))  # the fault
            return ring[-1]

    return Ring


MANIFEST = manifest("staging_ring_of_64", platform=platform)
