"""Attention has buffers for 16 layers, which the others share with them.

Caught by attention.layers at L2, naming "66 layers".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("attention_sixteen_layers", attention="attention_sixteen_layers:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import ToyPagedAttention

    class Sixteen(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            return super().forward(replace(layer, index=layer.index % 16), q, k, v, metadata)  # the fault

    return Sixteen(context)
