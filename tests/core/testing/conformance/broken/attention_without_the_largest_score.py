"""The softmax does not subtract the largest score, so that exponentials may be infinite.

Caught by attention.large_scores at L2, naming "scores of about".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("attention_without_the_largest_score", attention="attention_without_the_largest_score:attention")


def attention(context: BackendContext) -> Any:

    from srv_toy_device.attention import ToyPagedAttention

    class Overflowing(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            out = super().forward(layer, q, k, v, metadata)
            largest = (q.abs().amax() * k.abs().amax() * layer.scale).exp()  # the fault: of one product of elements
            return out + (largest - largest).to(out.dtype)

    return Overflowing(context)
