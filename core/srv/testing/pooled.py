"""Pooled hidden states by their definitions: the reference for what an engine pools."""

from __future__ import annotations

import torch
from torch import Tensor

from srv.types import Pooling


def pooled_reference(states: Tensor, pooling: Pooling) -> Tensor:
    """float32 [tokens, hidden], after the last norm -> float32 [hidden]."""
    count = len(states)
    weights = {
        Pooling.LAST: torch.eye(count)[-1],
        Pooling.CLS: torch.eye(count)[0],
        Pooling.MEAN: torch.full((count,), 1 / count),
        Pooling.WEIGHTED_MEAN: torch.arange(1.0, count + 1) / sum(range(1, count + 1)),
        Pooling.MEAN_SQRT_LEN: torch.full((count,), count**-0.5),
    }
    return states.max(0).values if pooling is Pooling.MAX else weights[pooling] @ states
