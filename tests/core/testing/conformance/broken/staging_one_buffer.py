"""Staging memory of one shape is allocated once and returned again, so that copies of different steps overwrite it.

Caught by copies.staging at L1, naming "share memory".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv_toy_device.device import Accelerator
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Saving(toy):  # type: ignore[valid-type, misc]
        def __init__(self, accelerator: Accelerator) -> None:
            super().__init__(accelerator)
            self._made: dict[object, torch.Tensor] = {}

        def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if (shape, dtype) not in self._made:
                self._made[shape, dtype] = super().staging(shape, dtype)
            return self._made[shape, dtype]  # the fault

    return Saving


MANIFEST = manifest("staging_one_buffer", platform=platform)
