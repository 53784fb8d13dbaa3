"""The plugin's own diagnosis reports a fault without a remedy.

Caught by platform.diagnose at L1, naming "clock".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import Check
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from srv.platform.interface import Check

    class Mute(toy):  # type: ignore[valid-type, misc]
        def diagnose(self) -> list[Check]:
            return [*super().diagnose(), Check("clock", False, "the clock is at half its rate")]  # the fault

    return Mute


MANIFEST = manifest("diagnosis_without_remedy", platform=platform)
