"""Routers that are no scoring of the op `route_experts`: they compute with torch's operators on every platform."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from srv.models.layers.moe_config import JITTER


def sparse_mixer(logits: Tensor, bias: Tensor | None, top_k: int, *others: Any) -> tuple[Tensor, Tensor]:
    """The two best experts of each token, one after the other: ids int64 [T, 2], weights float32 [T, 2].

    The weight of each is its share of a softmax over the experts that are not much worse, without those that were
    chosen before. (SparseMixer: Liu et al. 2023, arXiv:2310.00811, as Phi-3.5-MoE computes it when it does not train)
    """
    left, ids, weights = logits, list[Tensor](), list[Tensor]()
    for _ in range(top_k):
        best, chosen = left.max(-1, keepdim=True)
        is_worse = (best - logits) / logits.abs().clamp_min(best) > 2 * JITTER
        ids.append(chosen)
        weights.append(left.masked_fill(is_worse, -torch.inf).softmax(-1).gather(-1, chosen))
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(ids, -1), torch.cat(weights, -1)
