"""The platform supports int8 keys and values, but its pool has no scales.

Caught by attention.int8_kv at L2, naming "with their scales take".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

from srv_toy_device.facts import FACTS

if TYPE_CHECKING:
    from srv.platform.facts import DeviceFacts
    from srv.platform.interface import KVBuffers
    from srv.specs import KVLayout
    from srv_toy_device.platform import ToyPlatform


def capabilities(device: DeviceFacts) -> frozenset[str]:
    return FACTS.capabilities(device) | {"int8_kv"}


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from dataclasses import replace

    import torch

    from srv.platform.pools import pool_of

    class OfEightBits(toy):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            if layout.dtype != "int8":
                return super().kv_buffers(layout, pages)
            shapes = replace(layout, dtype="float16").plain_tensors(pages)  # the fault: only elements, no scales
            return pool_of(layout, shapes, lambda shape, _: torch.zeros(shape, dtype=torch.int8, device=self.device(0)))

    return OfEightBits


MANIFEST = manifest("int8_kv_without_scales", facts={"capabilities": capabilities}, platform=platform)
