"""A backend of decode steps alone sees one token more than the window.

Caught by attention.window at L2, naming "one_role (decode)".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_roles import DECODE, with_role

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = with_role("attention_decode_only_window", DECODE, "attention_decode_only_window:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import ToyPagedAttention

    class Wider(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            window = None if layer.window is None else layer.window + 1  # the fault
            return super().forward(replace(layer, window=window), q, k, v, metadata)

    return Wider(context)
