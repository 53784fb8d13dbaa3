"""Attention keeps the plan of every step, so that no plan is freed while the device may read it.

Caught by attention.steps at L2, naming "objects behind".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_keeps_plans", attention="attention_keeps_plans:attention")


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class Keeping(ToyPagedAttention):
        def __init__(self, context: BackendContext) -> None:
            super().__init__(context)
            self._plans: list[Metadata | GraphMetadata] = []

        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            self._plans.append(super().plan(batch))  # the fault
            return self._plans[-1]

    return Keeping(context)
