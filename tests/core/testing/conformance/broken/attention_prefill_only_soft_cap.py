"""A backend of prompts alone ignores the cap of the scores.

Caught by attention.soft_cap at L2, naming "one_role (prefill)".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_roles import PREFILL, with_role

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import AttentionLayer, BackendContext

MANIFEST = with_role("attention_prefill_only_soft_cap", PREFILL, "attention_prefill_only_soft_cap:attention")


def attention(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.attention import ToyPagedAttention

    class Uncapped(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            return super().forward(replace(layer, soft_cap=None), q, k, v, metadata)  # the fault

    return Uncapped(context)
