"""Attention pads heads to a power of two, and scales scores for the padded size.

Caught by attention.head_dims at L2, naming "heads of 80".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("attention_scale_of_padded_heads", attention="attention_scale_of_padded_heads:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import ToyPagedAttention

    class Padded(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            padded = 1 << (layer.head_dim - 1).bit_length()
            scale = layer.scale * (layer.head_dim / padded) ** 0.5  # the fault
            return super().forward(replace(layer, scale=scale), q, k, v, metadata)

    return Padded(context)
