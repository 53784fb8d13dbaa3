"""Keys and values of a layer share one buffer.

Caught by pool.separate at L1, naming "share memory".
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
            made = super().kv_buffers(layout, pages)
            return replace(made, values=made.keys)  # the fault

    return Shared


MANIFEST = manifest("pool_shares_buffers", platform=platform)
