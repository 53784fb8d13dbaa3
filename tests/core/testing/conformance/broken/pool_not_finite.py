"""A new KV pool is not initialized and can contain NaN.

Caught by pool.page_zero at L1, naming "NaN".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import KVBuffers
    from srv.specs import KVLayout
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Unwritten(toy):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            pool = super().kv_buffers(layout, pages)
            for tensor in pool.all():
                tensor[-1].fill_(float("nan"))  # the fault
            return pool

    return Unwritten


MANIFEST = manifest("pool_not_finite", platform=platform)
