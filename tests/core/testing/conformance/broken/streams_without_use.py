"""A stream's context does not make it the current one, so that its events are not behind its copies.

Caught by copies.streams at L1, naming "did not see".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.streams import Streams
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from contextlib import nullcontext

    class Unused(toy):  # type: ignore[valid-type, misc]
        def streams(self, device: torch.device) -> Streams:
            streams = super().streams(device)
            streams.copy_out.use = nullcontext  # type: ignore[method-assign]  # the fault
            return streams

    return Unused


MANIFEST = manifest("streams_without_use", platform=platform)
