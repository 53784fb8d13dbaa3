"""The platform has a public method that is not in the contract, so core would never call it.

Caught by platform.starts at L1, naming "synchronise".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Extended(toy):  # type: ignore[valid-type, misc]
        def synchronise(self) -> None:  # the fault
            """Wait for the device."""

    return Extended


MANIFEST = manifest("unknown_platform_member", platform=platform)
