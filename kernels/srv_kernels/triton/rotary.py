"""Rotary embedding with the pairs of GPT-NeoX: one launch for queries and keys, a program per token and few heads."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import store, widen
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import block
from srv_kernels.triton.variants import FLOATS, Variant, pointers

_HEADS = 4  # of a tile


@triton.jit
def _rotate(
    x, out, strides, heads, tile, cos, sin, half, dim, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr
):
    """Rotate a tile of heads of the program's token, and copy the elements from 2 · half on."""
    token = tl.program_id(0).to(tl.int64)
    head = tile * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (pair < half)
    read = x + token * strides[0] + head * strides[1]
    written = out + (token * heads + head) * dim
    first = widen(tl.load(read + pair, mask=mask, other=0.0))
    second = widen(tl.load(read + half + pair, mask=mask, other=0.0))
    store(written + pair, first * cos - second * sin, mask)
    store(written + half + pair, second * cos + first * sin, mask)
    if REST:
        rest = 2 * half + tl.arange(0, REST)[None, :]
        mask = (head < heads) & (rest < dim)
        store(written + rest, tl.load(read + rest, mask=mask), mask)


@triton.jit
def _rotary(
    q, k, q_out, k_out, cos_sin, positions, q_token, q_head, k_token, k_head, table_stride,
    heads, kv_heads, half, dim, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = cos_sin + tl.load(positions + tl.program_id(0)).to(tl.int64) * table_stride
    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(row + pair, mask=pair < half, other=0.0)
    sin = tl.load(row + half + pair, mask=pair < half, other=0.0)
    tile = tl.program_id(1)
    q_tiles = tl.cdiv(heads, HEADS)
    if tile < q_tiles:
        _rotate(q, q_out, (q_token, q_head), heads, tile, cos, sin, half, dim, HEADS, HALF, REST)
    else:
        _rotate(k, k_out, (k_token, k_head), kv_heads, tile - q_tiles, cos, sin, half, dim, HEADS, HALF, REST)


def _like(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(k.shape, dtype=k.dtype, device=k.device),
    )


@triton_op("rotary(Tensor q, Tensor k, Tensor cos_sin, Tensor positions) -> (Tensor, Tensor)", like=_like)
def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, KV, D], cos_sin float32 [P, R], positions int64 [T] -> (q', k').

    cos_sin has R/2 cosines, then R/2 sines. Pairs are (i, i + R/2); elements from R on are unchanged.
    """
    q_out, k_out = _like(q, k, cos_sin, positions)
    tokens, heads, dim = q.shape
    half = cos_sin.shape[1] // 2
    if tokens:
        q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
        strides = *q.stride()[:2], *k.stride()[:2], cos_sin.stride(0)
        rest = block(dim - 2 * half) if dim > 2 * half else 0
        grid = tokens, triton.cdiv(heads, _HEADS) + triton.cdiv(k.shape[1], _HEADS)
        _rotary[grid](
            q, k, q_out, k_out, cos_sin, positions, *strides, heads, k.shape[1], half, dim,
            HEADS=_HEADS, HALF=block(half), REST=rest,
        )  # fmt: skip
    return q_out, k_out


_STRIDES = ("q_token", "q_head", "k_token", "k_head", "table_stride")

VARIANTS = tuple(
    Variant(
        _rotary,
        {
            **pointers(dict.fromkeys(("q", "k", "q_out", "k_out"), kind)),
            "cos_sin": "*fp32",
            "positions": "*i64",
            **dict.fromkeys((*_STRIDES, "heads", "kv_heads", "half", "dim"), "i32"),
        },
        {"HEADS": _HEADS, "HALF": half, "REST": rest},
        aligned=(*_STRIDES, "half", "dim"),
    )
    for kind in FLOATS
    for half, rest in (
        (32, 0),
        (64, 0),
        (128, 0),
        (16, 64),
        (32, 64),
    )  # heads of 64 to 256, and partial ones of 80, 128
)
