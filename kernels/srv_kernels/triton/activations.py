"""Gated activations. They round the activation to the model's dtype before the product, as transformers does."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import round_to, store, widen
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import matrix
from srv_kernels.triton.variants import FLOATS, Variant, pointers

_BLOCK = 1024


@triton.jit
def _gated(x, out, x_stride, dim, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < dim
    gate = widen(tl.load(x + row * x_stride + columns, mask=mask, other=0.0))
    up = widen(tl.load(x + row * x_stride + dim + columns, mask=mask, other=0.0))
    inner = gate
    if GELU:
        # (1 + tanh(u)) / 2 is sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x³).
        inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    activated = gate / (1.0 + tl.exp(-inner))
    store(out + row * dim + columns, widen(round_to(activated, out.dtype.element_ty)) * up, mask)


def _like(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def _launch(x: Tensor, gelu: bool) -> Tensor:
    rows, out = matrix(x), _like(x)
    if out.numel():
        grid = rows.shape[0], triton.cdiv(out.shape[-1], _BLOCK)
        _gated[grid](rows, out, rows.stride(0), out.shape[-1], GELU=gelu, BLOCK=_BLOCK)
    return out


@triton_op("silu_and_mul(Tensor x) -> Tensor", like=_like)
def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] -> [..., I]: silu of the first half times the second."""
    return _launch(x, gelu=False)


@triton_op("gelu_tanh_and_mul(Tensor x) -> Tensor", like=_like)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] -> [..., I]: GELU (its tanh approximation) of the first half times the second."""
    return _launch(x, gelu=True)


VARIANTS = tuple(
    Variant(
        _gated,
        pointers({"x": kind, "out": kind}, "x_stride", "dim"),
        {"GELU": gelu, "BLOCK": _BLOCK},
        aligned=("x_stride", "dim"),
    )
    for kind in FLOATS
    for gelu in (False, True)
)
