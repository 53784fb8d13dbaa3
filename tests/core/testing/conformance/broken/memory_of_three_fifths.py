"""The platform counts three fifths of what is allocated: one of several pools of its driver.

Caught by pool.accounting at L1, naming "bytes are free after".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from srv.platform.interface import Memory

    class Counting(toy):  # type: ignore[valid-type, misc]
        def memory(self, device: torch.device) -> Memory:
            memory = super().memory(device)
            return Memory(memory.total - (memory.total - memory.free) * 3 // 5, memory.total)  # the fault

    return Counting


MANIFEST = manifest("memory_of_three_fifths", platform=platform)
