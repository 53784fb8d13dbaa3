"""A released KV pool stays allocated because the platform keeps a reference to each pool.

Caught by pool.allocator at L1, naming "bytes were not freed".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import KVBuffers
    from srv.specs import KVLayout
    from srv_toy_device.device import Accelerator
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Leaking(toy):  # type: ignore[valid-type, misc]
        def __init__(self, accelerator: Accelerator) -> None:
            super().__init__(accelerator)
            self._pools: list[KVBuffers] = []

        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            self._pools.append(super().kv_buffers(layout, pages))  # the fault
            return self._pools[-1]

    return Leaking


MANIFEST = manifest("leaks_pools", platform=platform)
