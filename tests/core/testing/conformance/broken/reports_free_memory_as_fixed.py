"""The reported free memory is always the total memory of the device.

Caught by pool.accounting at L1, naming "memory() says".
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

    class Optimistic(toy):  # type: ignore[valid-type, misc]
        def memory(self, device: torch.device) -> Memory:
            memory = super().memory(device)
            return replace(memory, free=memory.total)  # the fault

    return Optimistic


MANIFEST = manifest("reports_free_memory_as_fixed", platform=platform)
