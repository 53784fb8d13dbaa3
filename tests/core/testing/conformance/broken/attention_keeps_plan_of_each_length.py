"""Attention keeps a plan for each length of its longest row.

Caught by attention.steps at L2, naming "with longer rows each time left".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_keeps_plan_of_each_length", attention="attention_keeps_plan_of_each_length:attention")


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class Keeping(ToyPagedAttention):
        def __init__(self, context: BackendContext) -> None:
            super().__init__(context)
            self._plans: dict[int, Metadata | GraphMetadata] = {}

        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            planned = super().plan(batch)
            self._plans[max(batch.kv_lens)] = planned  # the fault
            return planned

    return Keeping(context)
