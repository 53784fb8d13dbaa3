"""The toy platform, which reports twice the memory that the device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from srv_toy_device.platform import ToyPlatform


def doubled(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from srv.platform.interface import Memory

    class Doubled(toy):  # type: ignore[valid-type, misc]
        def memory(self, device: torch.device) -> Memory:
            memory = super().memory(device)
            return Memory(memory.free * 2, memory.total * 2)

    return Doubled
