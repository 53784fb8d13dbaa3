"""RMS norms: one program per row, which holds the row in registers.

They round where transformers does: the norm is float32, rounded to the model's dtype, then multiplied by the weight.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import round_to, store, widen
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import block, matrix, warps
from srv_kernels.triton.variants import FLOATS, Variant, pointers


@triton.jit
def _normalize(x, weight, columns, mask, dim, eps, dtype: tl.constexpr):
    norm = round_to(x * tl.rsqrt(tl.sum(x * x) / dim + eps), dtype)
    return widen(norm) * widen(tl.load(weight + columns, mask=mask, other=0.0))


@triton.jit
def _rms_norm(x, weight, out, x_stride, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < dim
    wide = widen(tl.load(x + row * x_stride + columns, mask=mask, other=0.0))
    normal = _normalize(wide, weight, columns, mask, dim, eps, out.dtype.element_ty)
    store(out + row * dim + columns, normal, mask)


@triton.jit
def _add_rms_norm(x, residual, weight, out, total, x_stride, residual_stride, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < dim
    added = widen(tl.load(x + row * x_stride + columns, mask=mask, other=0.0))
    added += widen(tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0))
    rounded = round_to(added, total.dtype.element_ty)
    store(total + row * dim + columns, rounded, mask)
    normal = _normalize(widen(rounded), weight, columns, mask, dim, eps, out.dtype.element_ty)
    store(out + row * dim + columns, normal, mask)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@triton_op("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", like=lambda x, weight, eps: _like(x))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]; all of the model's dtype."""
    rows, out = matrix(x), _like(x)
    if rows.shape[0]:
        size = block(rows.shape[1])
        _rms_norm[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), rows.shape[1], eps, BLOCK=size, num_warps=warps(size)
        )
    return out


@triton_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    like=lambda x, residual, weight, eps: (_like(x), _like(x)),
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., D], weight [D] -> (rms_norm(residual + x), residual + x)."""
    rows, others, out, total = matrix(x), matrix(residual), _like(x), _like(x)
    if rows.shape[0]:
        size = block(rows.shape[1])
        strides = rows.stride(0), others.stride(0)
        _add_rms_norm[(rows.shape[0],)](
            rows, others, weight, out, total, *strides, rows.shape[1], eps, BLOCK=size, num_warps=warps(size)
        )
    return out, total


_SIZES = (64, 128, 256, 1024, 4096, 8192, 16384)  # head dims (of norms of queries and keys) and hidden sizes, padded

VARIANTS = tuple(
    Variant(
        kernel,
        {**pointers(dict.fromkeys(names, kind), *strides, "dim"), "eps": "fp32"},
        {"BLOCK": size},
        aligned=(*strides, "dim"),
        warps=warps(size),
    )
    for kernel, names, strides in (
        (_rms_norm, ("x", "weight", "out"), ("x_stride",)),
        (_add_rms_norm, ("x", "residual", "weight", "out", "total"), ("x_stride", "residual_stride")),
    )
    for kind in FLOATS
    for size in _SIZES
)
