"""It reports its memory in KiB rather than in bytes.

Caught by platform.memory at L1, naming "bytes in all".
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
            said = super().memory(device)
            return Memory(said.free >> 10, said.total >> 10)  # the fault

    return Scaled


MANIFEST = manifest("memory_in_kibibytes", platform=platform)
