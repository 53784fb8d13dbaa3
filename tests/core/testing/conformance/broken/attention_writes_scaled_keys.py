"""Keys are multiplied by the scale of the scores before they are stored; the scores are multiplied by it as well.

Caught by attention.writes at L2, naming "does not hold the key of token 0".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_writes_scaled_keys", attention="attention_writes_scaled_keys:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv.platform.interface import AttentionLayer
    from srv_toy_device.attention import ToyPagedAttention

    class Scaling(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            return super().forward(layer, q, k * layer.scale, v, metadata)  # the fault

    return Scaling(context)
