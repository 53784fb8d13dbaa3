"""An op of GPUs that PyTorch computes."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] -> float32 [T, N]: the sums as the matrix units accumulate them."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
