"""In a captured step, padded rows write to page 1, which may belong to a request, instead of page 0.

Caught by graph.padding at L2, naming "requests".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("page_zero_spills", attention="page_zero_spills:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class Spilling(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            metadata = super().plan(batch)
            if batch.graph is not None:
                slots = metadata.new_slots
                slots.copy_(torch.where(slots < self._page_size, slots + self._page_size, slots))  # the fault
            return metadata

    return Spilling(context)
