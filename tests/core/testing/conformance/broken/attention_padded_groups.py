"""Attention rounds the number of query heads that share a KV head up to a power of two, so that three and seven differ.

Caught by attention.gqa at L2, naming "9/3 heads".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_padded_groups", attention="attention_padded_groups:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv.platform.interface import AttentionLayer
    from srv_toy_device.attention import ToyPagedAttention

    class Padded(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            sharing = layer.heads // layer.kv_heads
            padded = 1 << (sharing - 1).bit_length()  # the fault
            head = torch.arange(layer.heads, device=q.device)
            order = (head // padded * sharing + head % padded).clamp(max=layer.heads - 1)
            return super().forward(layer, q[:, order], k, v, metadata)

    return Padded(context)
