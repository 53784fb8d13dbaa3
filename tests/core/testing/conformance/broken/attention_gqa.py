"""Attention pairs query heads with KV heads in the wrong order, which shows only if several share a KV head.

Caught by attention.gqa at L2, naming "shared KV heads".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_gqa", attention="attention_gqa:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv.platform.interface import AttentionLayer
    from srv_toy_device.attention import ToyPagedAttention

    class Interleaved(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            heads = torch.arange(layer.heads, device=q.device)
            order = heads.view(-1, layer.kv_heads).t().flatten()  # the fault
            return super().forward(layer, q[:, order], k, v, metadata)[:, order.argsort()]

    return Interleaved(context)
