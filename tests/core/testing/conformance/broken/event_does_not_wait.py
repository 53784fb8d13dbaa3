"""Waiting for an event returns at once, so core reads results before they have arrived.

Caught by platform.events at L1, naming "after the event".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.streams import Streams
    from srv_toy_device.platform import ToyPlatform


class Impatient:
    """An event that is always complete."""

    def synchronize(self) -> None:
        return  # the fault


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Hasty(toy):  # type: ignore[valid-type, misc]
        def streams(self, device: torch.device) -> Streams:
            streams = super().streams(device)
            streams.compute.record = Impatient  # the fault is its event
            return streams

    return Hasty


MANIFEST = manifest("event_does_not_wait", platform=platform)
