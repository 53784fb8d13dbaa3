"""Attention multiplies the queries by the scale in place.

Caught by attention.inputs at L2, naming "changed q".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("attention_scales_q", attention="attention_scales_q:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import ToyPagedAttention

    class Scaling(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            q.mul_(layer.scale)  # the fault
            return super().forward(replace(layer, scale=1.0), q, k, v, metadata)

    return Scaling(context)
