"""The KV pool is in host memory instead of device memory.

Caught by pool.placement at L1, naming "is on cpu".
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

    class OnHost(toy):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            pool = super().kv_buffers(layout, pages)
            host = {
                name: tuple(tensor.to("cpu") for tensor in some) for name, some in pool.tensors.items()
            }  # the fault
            return replace(pool, tensors=host)

    return OnHost


MANIFEST = manifest("pool_on_host", platform=platform)
