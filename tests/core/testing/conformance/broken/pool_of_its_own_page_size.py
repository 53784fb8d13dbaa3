"""The KV pool has pages of 32 tokens, regardless of the page size that the user set.

Caught by pool.shapes at L1, naming "page_size=32".
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

    class Opinionated(toy):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            return super().kv_buffers(replace(layout, page_size=32), pages)  # the fault

    return Opinionated


MANIFEST = manifest("pool_of_its_own_page_size", platform=platform)
