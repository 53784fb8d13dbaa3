"""Rows are computed one after the other: each one writes its keys and values, and attends before the next one writes.

Caught by attention.same_step at L2, naming "rows over pages of the same step".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor

    from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext

MANIFEST = manifest("attention_row_after_row", attention="attention_row_after_row:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv.platform.interface import AttentionBatch as Batch
    from srv_toy_device.attention import ToyPagedAttention

    class RowAfterRow(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Any:
            if batch.graph is not None:
                return super().plan(batch)
            rows = zip(batch.query_lens, batch.kv_lens, batch.page_table.split(1), strict=True)
            return [
                (queries, super(RowAfterRow, self).plan(Batch([queries], [kv], table))) for queries, kv, table in rows
            ]

        def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
            if not isinstance(metadata, list):
                return super().forward(layer, q, k, v, metadata)
            parts = zip(*(part.split([queries for queries, _ in metadata]) for part in (q, k, v)), strict=True)
            attend = super().forward  # the fault: it writes only this row's keys and values
            return torch.cat(
                [attend(layer, *part, part_metadata) for part, (_, part_metadata) in zip(parts, metadata, strict=True)]
            )

    return RowAfterRow(context)
