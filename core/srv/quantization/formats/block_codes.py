"""Codes of 4 bits in the order of GGUF's blocks: the low halves of 16 bytes are 16 weights, high halves the next 16.

Must not know checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 32  # weights in 16 bytes
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))  # the values of MXFP4's and NVFP4's codes


def codes_of(stored: Tensor, *, high_first: bool = False) -> Tensor:
    """The codes of bytes that hold two neighbouring weights each: uint8 [..., n] -> [..., 2 n].

    `high_first`: the first weight is in the high half.
    """
    low, high = stored & 15, stored >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, -1).flatten(-2)


def in_blocks(codes: Tensor) -> Tensor:
    """uint8 [..., K] -> [..., K / 32, 16], in GGUF's order. K must be whole runs."""
    runs = codes.view(*codes.shape[:-1], -1, 2, RUN // 2)
    return runs[..., 0, :] | (runs[..., 1, :] << 4)
