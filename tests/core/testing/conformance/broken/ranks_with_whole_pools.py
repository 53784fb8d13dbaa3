"""Each rank allocates as many pages as all ranks of the host together need.

Caught by engine.ranks at L3, naming "its share is".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpu_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import KVBuffers
    from srv.specs import KVLayout
    from srv_cpu.platform import CpuPlatform


def greedy(cpu: type[CpuPlatform]) -> type[CpuPlatform]:
    class Greedy(cpu):  # type: ignore[valid-type, misc]
        def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
            buffers: KVBuffers = super().kv_buffers(layout, pages * self._context.local_ranks)  # the fault
            return buffers

    return Greedy


MANIFEST = manifest("ranks_with_whole_pools", greedy)
