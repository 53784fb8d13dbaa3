"""Attention stores the keys and values of all layers in the buffers of the first layer.

Caught by attention.layers at L2, naming "66 layers".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("attention_one_layer", attention="attention_one_layer:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import ToyPagedAttention

    class OneLayer(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            return super().forward(replace(layer, index=0), q, k, v, metadata)  # the fault

    return OneLayer(context)
