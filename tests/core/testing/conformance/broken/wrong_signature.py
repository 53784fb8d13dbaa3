"""A parameter of a platform method has another name than in the contract.

Caught by platform.starts at L1, naming "kv_buffers".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import KVBuffers
    from srv.specs import KVLayout
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Renaming(toy):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, num_blocks: int) -> KVBuffers:  # the fault: it is `pages`
            return super().kv_buffers(layout, num_blocks)

    return Renaming


MANIFEST = manifest("wrong_signature", platform=platform)
