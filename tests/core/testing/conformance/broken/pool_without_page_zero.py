"""The KV pool has no page 0 for the writes of padded rows.

Caught by pool.shapes at L1, naming "shape (5, ".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import KVBuffers
    from srv.specs import KVLayout
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Thrifty(toy):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            return super().kv_buffers(layout, pages - 1)  # the fault

    return Thrifty


MANIFEST = manifest("pool_without_page_zero", platform=platform)
