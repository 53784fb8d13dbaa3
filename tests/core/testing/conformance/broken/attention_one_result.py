"""Attention returns its results for every layer in the same memory.

Caught by attention.results at L2, naming "overwritten".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("attention_one_result", attention="attention_one_result:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.attention import ToyPagedAttention

    class OneResult(ToyPagedAttention):
        results: dict[Any, torch.Tensor] = {}  # noqa: RUF012 - one per process is the fault

        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            result = self.results.setdefault((q.shape, q.dtype), torch.empty_like(q))
            return result.copy_(super().forward(layer, q, k, v, metadata))

    return OneResult(context)
