"""What the process has allocated is reported in KiB.

Caught by platform.memory_use at L1, naming "memory_use says".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import MemoryUse
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from srv.platform.interface import MemoryUse

    class Kibibytes(toy):  # type: ignore[valid-type, misc]
        def memory_use(self, device: torch.device, reset_peak: bool) -> MemoryUse:
            use = super().memory_use(device, reset_peak)
            return MemoryUse(use.now // 1024, use.peak // 1024)  # the fault

    return Kibibytes


MANIFEST = manifest("memory_use_in_kibibytes", platform=platform)
