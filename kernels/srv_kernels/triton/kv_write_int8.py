"""Writes of new keys and values into int8 pools with one scale per vector: 1/127 of its largest magnitude, float32.

    page    elements [page_size, kv_heads, dim], then scales [page_size, kv_heads]
    pool    int8 [pages + 1, page_size * kv_heads * (dim + 4)], of which `views` are what attention reads

Page 0 takes the rows of padding, as in `kv_write`.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import store, widen
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import block, warps
from srv_kernels.triton.variants import FLOATS, Variant, pointers


def views(pool: Tensor, page_size: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """int8 [pages + 1, page_size, kv_heads, dim] and the scales, float32 [pages + 1, page_size, kv_heads], of a pool.

    `dim` is a multiple of 4.
    """
    elements = page_size * kv_heads * dim
    scales = pool[:, elements:].view(torch.float32)
    return pool[:, :elements].unflatten(1, (page_size, kv_heads, dim)), scales.unflatten(1, (page_size, kv_heads))


@triton.jit
def _write_row(
    x,
    pool,
    scales,
    page,
    position,
    token_stride,
    head_stride,
    pool_page,
    scale_page,
    kv_heads,
    dim,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, DIM)[None, :]
    mask = (head < kv_heads)[:, None] & (column < dim)
    where = x + token * token_stride + head[:, None] * head_stride + column
    vector = widen(tl.load(where, mask=mask, other=0.0))
    # A vector with NaN or infinity gets a scale of NaN, so that it does not go unnoticed.
    scale = tl.max(tl.abs(vector), 1) / 127.0 + tl.sum(vector * 0.0, 1)
    quantized = vector / tl.where(scale == 0.0, 1.0, scale)[:, None]
    row = position * kv_heads + head
    elements = tl.where(quantized == quantized, quantized, 0.0)
    store(pool + page * pool_page + (row * dim)[:, None] + column, elements, mask=mask)
    store(scales + page * scale_page + row, scale, mask=head < kv_heads)


@triton.jit
def _write_kv_int8(
    key, value, key_pool, value_pool, key_scale, value_scale, slots, page_size, key_token, key_head, value_token,
    value_head, key_page, value_page, key_scale_page, value_scale_page, kv_heads, key_dim, value_dim,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    page, position = slot // page_size, slot % page_size
    _write_row(
        key, key_pool, key_scale, page, position, key_token, key_head, key_page, key_scale_page, kv_heads, key_dim,
        HEADS, KEY_DIM,
    )  # fmt: skip
    _write_row(
        value, value_pool, value_scale, page, position, value_token, value_head, value_page, value_scale_page, kv_heads,
        value_dim, HEADS, VALUE_DIM,
    )  # fmt: skip


@triton_op(
    "write_kv_int8(Tensor key, Tensor value, Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor(c!) key_scale, "
    "Tensor(d!) value_scale, Tensor slots) -> ()"
)
def write_kv_int8(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    slots: Tensor,
) -> None:
    """Write key [T, KV, K] and value [T, KV, V] into pools and scales, both `views`, at `slots`, integers [T].

    Two tokens with one slot leave the vector of either, or a mixture.
    """
    if not slots.numel():
        return
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    heads, key_dim, value_dim = key.shape[1], key.shape[2], value.shape[2]
    blocks = block(heads), block(key_dim), block(value_dim)
    pools = (key_pool, value_pool, key_scale, value_scale)
    _write_kv_int8[(slots.numel(),)](
        key, value, *pools, slots, key_pool.shape[1], *key.stride()[:2], *value.stride()[:2],
        *(pool.stride(0) for pool in pools), heads, key_dim, value_dim, HEADS=blocks[0], KEY_DIM=blocks[1],
        VALUE_DIM=blocks[2], num_warps=warps(blocks[0] * max(blocks[1:])),
    )  # fmt: skip


_STRIDES = ("key_token", "key_head", "value_token", "value_head")
_PAGES = ("key_page", "value_page", "key_scale_page", "value_scale_page")
_POOLS = {"key_pool": "i8", "value_pool": "i8", "key_scale": "fp32", "value_scale": "fp32", "slots": "i64"}

VARIANTS = tuple(
    Variant(
        _write_kv_int8,
        pointers(
            {"key": kind, "value": kind, **_POOLS}, "page_size", *_STRIDES, *_PAGES, "kv_heads", "key_dim", "value_dim"
        ),
        {"HEADS": heads, "KEY_DIM": dim, "VALUE_DIM": dim},
        aligned=(*_STRIDES, *_PAGES, "key_dim", "value_dim"),
        warps=warps(heads * dim),
    )
    for kind in FLOATS
    for heads, dim in ((8, 64), (8, 128), (8, 256))
)
