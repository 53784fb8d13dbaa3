"""Writes of new keys and values into pools of the order page_token_head.

    key pool [pages + 1, page_size, kv_heads, key_dim], contiguous; slot = page · page_size + position in the page

Page 0 takes the rows of padding: their slots are less than page_size, and what they write is never read.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import store, widen
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import block, warps
from srv_kernels.triton.variants import FLOATS, Variant, pointers


@triton.jit
def _write_row(
    x,
    pool,
    scale,
    slot,
    token_stride,
    head_stride,
    kv_heads,
    dim,
    SCALED: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, DIM)[None, :]
    mask = (head < kv_heads) & (column < dim)
    vector = tl.load(x + token * token_stride + head * head_stride + column, mask=mask, other=0.0)
    written = pool + (slot * kv_heads + head) * dim + column
    if SCALED:
        store(written, widen(vector) / tl.load(scale), mask)
    elif vector.dtype == pool.dtype.element_ty:
        store(written, vector, mask)
    else:
        store(written, widen(vector), mask)


@triton.jit
def _write_kv(
    key, value, key_pool, value_pool, key_scale, value_scale, slots, key_token, key_head, value_token, value_head,
    kv_heads, key_dim, value_dim,
    SCALED: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    _write_row(key, key_pool, key_scale, slot, key_token, key_head, kv_heads, key_dim, SCALED, HEADS, KEY_DIM)
    _write_row(
        value, value_pool, value_scale, slot, value_token, value_head, kv_heads, value_dim, SCALED, HEADS, VALUE_DIM
    )


@triton_op(
    "write_kv(Tensor key, Tensor value, Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor slots, "
    "Tensor? key_scale=None, Tensor? value_scale=None) -> ()"
)
def write_kv(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write key [T, KV, K] and value [T, KV, V] into pools [pages + 1, page_size, KV, K or V] at `slots`, integers [T].

    Pools have a float dtype of their own, to which vectors are rounded; float8 saturates. The scales, float32 [1], are
    given both or neither: a pool then holds key / key_scale. Two tokens with one slot leave either's vector.
    ValueError for an integer pool, which needs a scale per vector, and for a pool that is not contiguous.
    """
    for pool in (key_pool, value_pool):
        if not pool.dtype.is_floating_point or not pool.is_contiguous():
            raise ValueError(f"write_kv takes contiguous float pools, not {pool.dtype} with strides {pool.stride()}")
    if (key_scale is None) != (value_scale is None):
        raise ValueError("write_kv takes a scale for keys and one for values, or neither")
    if not slots.numel():
        return
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    heads, key_dim, value_dim = key.shape[1], key.shape[2], value.shape[2]
    blocks = block(heads), block(key_dim), block(value_dim)
    scales = (slots, slots) if key_scale is None else (key_scale, value_scale)  # without scales, they are not read
    _write_kv[(slots.numel(),)](
        key, value, key_pool, value_pool, *scales, slots, *key.stride()[:2], *value.stride()[:2],
        heads, key_dim, value_dim, SCALED=key_scale is not None, HEADS=blocks[0], KEY_DIM=blocks[1],
        VALUE_DIM=blocks[2], num_warps=warps(blocks[0] * max(blocks[1:])),
    )  # fmt: skip


_STRIDES = ("key_token", "key_head", "value_token", "value_head")
_FLOAT8 = ("fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16")

VARIANTS = tuple(
    Variant(
        _write_kv,
        {
            **pointers({"key": kind, "value": kind, "key_pool": pool, "value_pool": pool}),
            **dict.fromkeys(("key_scale", "value_scale"), "*fp32" if pool in _FLOAT8 else "*i64"),
            "slots": "*i64",
            **dict.fromkeys((*_STRIDES, "kv_heads", "key_dim", "value_dim"), "i32"),
        },
        {"SCALED": pool in _FLOAT8, "HEADS": heads, "KEY_DIM": dim, "VALUE_DIM": dim},
        aligned=(*_STRIDES, "key_dim", "value_dim"),
        warps=warps(heads * dim),
    )
    for kind, pool in (*((kind, kind) for kind in FLOATS), *((kind, pool) for pool in _FLOAT8 for kind in FLOATS))
    for heads, dim in ((8, 64), (8, 128), (8, 256), (32, 128))
)
