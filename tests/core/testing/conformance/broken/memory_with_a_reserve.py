"""The memory that the platform keeps for itself counts as free.

Caught by pool.allocatable at L1, naming "is refused".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import Memory
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from dataclasses import replace

    import torch

    class Reserving(toy):  # type: ignore[valid-type, misc]
        def init_worker(self, rank: int) -> None:
            super().init_worker(rank)
            size = super().memory(self.device(rank)).total * 2 // 5
            self._reserve = torch.empty(size, dtype=torch.uint8, device=self.device(rank))

        def memory(self, device: torch.device) -> Memory:
            memory = super().memory(device)
            return replace(memory, free=memory.free + self._reserve.nbytes)  # the fault

    return Reserving


MANIFEST = manifest("memory_with_a_reserve", platform=platform)
