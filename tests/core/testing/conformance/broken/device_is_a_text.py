"""The device is its name instead of a torch.device.

Caught by platform.device at L1, naming "returned a str".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Named(toy):  # type: ignore[valid-type, misc]
        def device(self, index: int) -> str:
            return str(super().device(index))  # the fault

    return Named


MANIFEST = manifest("device_is_a_text", platform=platform)
