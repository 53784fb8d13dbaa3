"""Attention keeps the latest plan in its module, which the backends of two cache groups share.

Caught by attention.groups at L2, naming "two cache groups".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionBatch, BackendContext

MANIFEST = manifest("attention_plan_of_all_groups", attention="attention_plan_of_all_groups:attention")
_LATEST: dict[str, Any] = {}


def attention(context: BackendContext) -> Any:
    import torch

    from srv.platform.interface import AttentionLayer
    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class OnePlan(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            _LATEST["plan"] = super().plan(batch)  # the fault
            return _LATEST["plan"]

        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            eager = not isinstance(metadata, GraphMetadata)
            return super().forward(layer, q, k, v, _LATEST["plan"] if eager else metadata)

    return OnePlan(context)
