"""The KV pool order of the native kernels. Imports no torch, since the facts name the order.

Within a page, the keys of a head are [blocks of 16 tokens, dim / n, 16, n] and its values [blocks, 16 / n, dim, n],
with n = `INTERLEAVE` of the pool's dtype, so that one dot product serves both. A block of int8 is followed by the
scales of its tokens, float32 [16]: see native/kv_layout.h.
"""

from __future__ import annotations

from srv.specs import SCALE_BYTES, KVLayout
from srv_kernels.cpu.library import BLOCK_TOKENS, MAX_HEAD_DIM

ORDER = "page_head_packed"
PAGE_SIZES = (16, 32, 64, 128, 256)
COLUMNS = 16  # head sizes must be multiples of this
INTERLEAVE = {"float32": 1, "float16": 1, "bfloat16": 2, "int8": 4}


def head_dim_reason(dim: int) -> str | None:
    """Why the kernels cannot compute with heads of this size; None if they can."""
    if dim % COLUMNS or dim > MAX_HEAD_DIM:
        return f"head dim {dim} is not a multiple of {COLUMNS} up to {MAX_HEAD_DIM}"
    return None


def shapes(layout: KVLayout, pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a layer's key and value buffers in this order; `pages` includes page 0.

    For int8, the last axis contains a block's values and then their scales.
    """
    group, interleave = layout.group, INTERLEAVE[layout.dtype]
    blocks = (pages, group.kv_heads, layout.page_size // BLOCK_TOKENS)
    if layout.dtype == "int8":
        keys, values = (BLOCK_TOKENS * (dim + SCALE_BYTES) for dim in (group.key_dim, group.value_dim))
        return (*blocks, keys), (*blocks, values)
    keys = (*blocks, group.key_dim // interleave, BLOCK_TOKENS, interleave)
    return keys, (*blocks, BLOCK_TOKENS // interleave, group.value_dim, interleave)
