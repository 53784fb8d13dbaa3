"""Rows of a step whose first page is the same are treated as one row: they get the pages of the first of them.

Caught by attention.sharing at L2, naming "over shared pages".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_one_row_a_prefix", attention="attention_one_row_a_prefix:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class Merging(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            if batch.graph is not None:
                return super().plan(batch)
            return super().plan(replace(batch, page_table=_merged(batch.page_table)))

    def _merged(table: torch.Tensor) -> torch.Tensor:
        first = table[:, 0].tolist()
        return table[[first.index(page) for page in first]]  # the fault

    return Merging(context)
