"""Staging memory is ordinary host memory.

It shows with SRV_TOY_ASYNCHRONOUS=1.

Caught by copies.staging at L1, naming "not pinned".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    import torch

    class Pageable(toy):  # type: ignore[valid-type, misc]
        def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)  # the fault

    return Pageable


MANIFEST = manifest("staging_pageable", platform=platform)
