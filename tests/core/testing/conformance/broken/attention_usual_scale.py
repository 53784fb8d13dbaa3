"""Attention scales by 1 / sqrt(head_dim), whatever the layer says.

Caught by attention.scale at L2, naming "not 1 / sqrt(head_dim)".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("attention_usual_scale", attention="attention_usual_scale:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import ToyPagedAttention

    class UsualScale(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            layer = replace(layer, scale=layer.head_dim**-0.5)  # the fault
            return super().forward(layer, q, k, v, metadata)

    return UsualScale(context)
