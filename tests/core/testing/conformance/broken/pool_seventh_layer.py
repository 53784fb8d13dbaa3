"""Full attention has six tensors per name, and the seventh layer uses that of the first one.

Caught by pool.cache_specs at L1, naming "of layer 0 share memory".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import KVBuffers
    from srv.specs import KVLayout
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from dataclasses import replace

    from srv.specs import FullAttention

    class Shared(toy):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            pool = super().kv_buffers(layout, pages)
            if not isinstance(layout.group, FullAttention):
                return pool
            layers = range(len(layout.group.layers))
            shared = {name: tuple(buffers[index % 6] for index in layers) for name, buffers in pool.tensors.items()}
            return replace(pool, tensors=shared)  # the fault

    return Shared


MANIFEST = manifest("pool_seventh_layer", platform=platform)
