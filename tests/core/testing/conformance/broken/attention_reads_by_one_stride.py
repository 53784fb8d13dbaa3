"""Queries are read as if each token followed the one before it in memory.

Caught by attention.strides at L2, naming "reading them is at fault".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_reads_by_one_stride", attention="attention_reads_by_one_stride:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv.platform.interface import AttentionLayer
    from srv_toy_device.attention import ToyPagedAttention

    class OneStride(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            _, heads, dim = q.shape
            q = q.as_strided(q.shape, (heads * dim, dim, 1))  # the fault
            return super().forward(layer, q, k, v, metadata)

    return OneStride(context)
