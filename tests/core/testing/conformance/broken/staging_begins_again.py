"""Staging memory is cut from one block, from whose beginning it goes on when it is used up.

Caught by copies.staging at L1, naming "share memory".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv_toy_device.device import Accelerator
    from srv_toy_device.platform import ToyPlatform

SIZE = 8 << 20


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    import math

    import torch

    class Ring(toy):  # type: ignore[valid-type, misc]
        def __init__(self, accelerator: Accelerator) -> None:
            super().__init__(accelerator)
            self._ring, self._at = super().staging((SIZE,), torch.uint8), 0

        def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            size = -(-math.prod(shape) * dtype.itemsize // 64) * 64
            if self._at + size > SIZE:
                self._at = 0  # the fault
            begin, self._at = self._at, self._at + size
            return self._ring[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    return Ring


MANIFEST = manifest("staging_begins_again", platform=platform)
