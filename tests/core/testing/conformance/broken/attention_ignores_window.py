"""Attention uses the whole context of a row in a layer with a sliding window.

Caught by attention.window at L2, naming "a window of 1 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = manifest("attention_ignores_window", attention="attention_ignores_window:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import ToyPagedAttention

    class Unbounded(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            return super().forward(replace(layer, window=None), q, k, v, metadata)  # the fault

    return Unbounded(context)
