"""Matrices of rows as kernels read them: a view of [rows, dim] whose elements are adjacent within a row."""

from __future__ import annotations

import triton
from torch import Tensor


def matrix(x: Tensor) -> Tensor:
    """x [..., D] as [rows, D] with a stride of 1 along D; a copy only if x's strides do not allow a view."""
    flat = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def block(dim: int) -> int:
    """The number of elements of the tile for a row: a power of two."""
    return triton.next_power_of_2(dim)


def warps(elements: int) -> int:
    """`num_warps` of a program that holds a tile of `elements` in registers."""
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16
