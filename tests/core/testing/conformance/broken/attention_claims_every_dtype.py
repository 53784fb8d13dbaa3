"""The attention backend accepts every dtype of the platform, but has no kernel for bfloat16.

Caught by attention.dtypes at L2, naming "bfloat16".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("attention_claims_every_dtype", attention="attention_claims_every_dtype:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.attention import ToyPagedAttention

    class HalfOnly(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            if q.dtype is torch.bfloat16:
                raise TypeError("toy_paged is not implemented for bfloat16")  # the fault: its check does not say so
            return super().forward(layer, q, k, v, metadata)

    return HalfOnly(context)
