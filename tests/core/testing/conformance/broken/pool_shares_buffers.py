"""Keys and values of a layer share one buffer.

Caught by pool.cache_specs at L1, naming "share memory".
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

    class Shared(toy):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            pool = super().kv_buffers(layout, pages)
            if "value" not in pool.tensors or pool.keys[0].shape != pool.values[0].shape:
                return pool
            return replace(pool, tensors={**pool.tensors, "value": pool.keys})  # the fault

    return Shared


MANIFEST = manifest("pool_shares_buffers", platform=platform)
