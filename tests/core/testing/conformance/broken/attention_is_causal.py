"""The spec has the trait bidirectional, but tokens attend to earlier ones only.

Caught by attention.both_ways at L2, naming "attention to later tokens".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from toy_variant import backends, manifest

if TYPE_CHECKING:
    from torch import Tensor

    from srv.platform.interface import AttentionBatch, AttentionLayer, BackendContext

SPECS = {
    family: tuple(dataclasses.replace(spec, traits=(*spec.traits, "bidirectional")) for spec in specs)
    if family == "attention"
    else specs
    for family, specs in backends(attention="attention_is_causal:attention").items()
}
MANIFEST = manifest("attention_is_causal", facts={"backends": SPECS})


def attention(context: BackendContext) -> Any:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from srv_toy_device.attention import ToyPagedAttention

    class Causal(ToyPagedAttention):
        def supports(self, layer: AttentionLayer) -> str | None:
            return None if layer.bidirectional else super().supports(layer)

        def plan(self, batch: AttentionBatch) -> Any:
            return batch if not context.kv.keys else super().plan(batch)

        def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
            if not layer.bidirectional:
                return super().forward(layer, q, k, v, metadata)
            rows = zip(*(x.cpu().transpose(0, 1).split(list(metadata.query_lens), 1) for x in (q, k, v)), strict=True)
            out = [scaled_dot_product_attention(*row, is_causal=True) for row in rows]  # the fault
            return torch.cat(out, 1).transpose(0, 1).to(q.device)

    return Causal(context)
