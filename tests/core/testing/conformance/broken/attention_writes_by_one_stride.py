"""Values are read as if each token followed the one before it in memory, before they are stored.

Caught by attention.strides at L2, naming "writing keys and values is at fault".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_writes_by_one_stride", attention="attention_writes_by_one_stride:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv.platform.interface import AttentionLayer
    from srv_toy_device.attention import ToyPagedAttention

    class OneStride(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            _, heads, dim = v.shape
            v = v.as_strided(v.shape, (heads * dim, dim, 1))  # the fault
            return super().forward(layer, q, k, v, metadata)

    return OneStride(context)
