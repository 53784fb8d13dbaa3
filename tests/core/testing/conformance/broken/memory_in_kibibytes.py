"""The platform reports its memory in KiB instead of bytes.

Caught by platform.memory at L1, naming "bytes in total".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from srv.platform.interface import Memory

    class Scaled(toy):  # type: ignore[valid-type, misc]
        def memory(self, device: torch.device) -> Memory:
            memory = super().memory(device)
            return Memory(memory.free >> 10, memory.total >> 10)  # the fault

    return Scaled


MANIFEST = manifest("memory_in_kibibytes", platform=platform)
