"""Attention is declared batch invariant, but rounds differently if a step has several rows.

Caught by attention.batch_invariant at L2, naming "next to other rows".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from toy_variant import backends, manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext

FAMILIES = backends(attention="attention_claims_invariance:attention")
ATTENTION = tuple(dataclasses.replace(spec, batch_invariant=True) for spec in FAMILIES["attention"])
MANIFEST = manifest("attention_claims_invariance", facts={"backends": {**FAMILIES, "attention": ATTENTION}})


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import GraphMetadata, Metadata, ToyPagedAttention

    class Rounding(ToyPagedAttention):
        def plan(self, batch: AttentionBatch) -> Metadata | GraphMetadata:
            self._several = len(batch.query_lens) > 1
            return super().plan(batch)

        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            out = super().forward(layer, q, k, v, metadata)
            return out * (1 + 2.0**-20) if self._several else out  # the fault

    return Rounding(context)
