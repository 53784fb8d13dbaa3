"""A stream does not wait for events of other streams, so that results are copied before they are computed.

It shows with SRV_TOY_ASYNCHRONOUS=1.

Caught by copies.streams at L1, naming "did not see".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.streams import Event, Streams
    from srv_toy_device.platform import ToyPlatform


def _no_wait(event: Event) -> None:
    return  # the fault


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Hasty(toy):  # type: ignore[valid-type, misc]
        def streams(self, device: torch.device) -> Streams:
            streams = super().streams(device)
            for stream in (streams.compute, streams.copy_in, streams.copy_out):
                stream.wait = _no_wait  # type: ignore[method-assign]
            return streams

    return Hasty


MANIFEST = manifest("copies_out_early", platform=platform)
