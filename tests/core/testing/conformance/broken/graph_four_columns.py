"""A captured step copies the page table into one of its own, which has four columns.

Caught by graph.lengths at L2, naming "pages of 1".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("graph_four_columns", attention="graph_four_columns:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class FourColumns(ToyPagedAttention):
        def __init__(self, context: BackendContext) -> None:
            super().__init__(context)
            self._tables: dict[int, torch.Tensor] = {}

        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            if batch.graph is None:
                return super().plan(batch)
            if batch.graph not in self._tables:
                self._tables[batch.graph] = torch.zeros_like(batch.page_table)
            table = self._tables[batch.graph]
            table[:, :4].copy_(batch.page_table[:, :4])  # the fault
            return super().plan(replace(batch, page_table=table))

    return FourColumns(context)
