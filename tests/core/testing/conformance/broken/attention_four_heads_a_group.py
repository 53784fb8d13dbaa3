"""Attention computes at most four query heads per KV head, and leaves the others at zero.

Caught by attention.gqa at L2, naming "10/2 heads".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_four_heads_a_group", attention="attention_four_heads_a_group:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv.platform.interface import AttentionLayer
    from srv_toy_device.attention import ToyPagedAttention

    class FourHeads(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            out = super().forward(layer, q, k, v, metadata)
            out.unflatten(1, (layer.kv_heads, -1))[:, :, 4:] = 0  # the fault
            return out

    return FourHeads(context)
