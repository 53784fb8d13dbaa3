"""Attention assumes that the page table is as wide as the longest row, and counts its columns from the end.

Caught by attention.unused_columns at L2, naming "a wide page table".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_columns_from_the_end", attention="attention_columns_from_the_end:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class FromTheEnd(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            if batch.graph is not None:
                return super().plan(batch)
            needed = -(-max(batch.kv_lens) // self._page_size)
            return super().plan(replace(batch, page_table=batch.page_table[:, -needed:]))  # the fault

    return FromTheEnd(context)
