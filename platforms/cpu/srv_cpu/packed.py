"""The order of a KV pool that native kernels read. Imports no torch: facts name it.

Keys of one head lie as [blocks of 16 tokens, dim / n, 16, n] within a page, values as [blocks, 16 / n, dim, n], where n
is `INTERLEAVE` of the pool's type, so that one product serves keys and values alike. Behind each block of int8 lie the
scales of its tokens, float32 [16]: native/kv_layout.h says how they are made.
"""

from __future__ import annotations

from srv.specs import SCALE_BYTES, KVLayout
from srv_kernels.cpu.library import BLOCK_TOKENS

ORDER = "page_head_packed"
PAGE_SIZES = (16, 32, 64, 128, 256)
COLUMNS = 16  # a head is worked through so many columns at a time
INTERLEAVE = {"float32": 1, "float16": 1, "bfloat16": 2, "int8": 4}


def shapes(layout: KVLayout, pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one layer's key and value buffer in this order, `pages` counting page 0 too.

    Of int8, a block's numbers and their scales lie in one axis.
    """
    group, interleave = layout.group, INTERLEAVE[layout.dtype]
    blocks = (pages, group.kv_heads, layout.page_size // BLOCK_TOKENS)
    if layout.dtype == "int8":
        keys, values = (BLOCK_TOKENS * (dim + SCALE_BYTES) for dim in (group.key_dim, group.value_dim))
        return (*blocks, keys), (*blocks, values)
    keys = (*blocks, group.key_dim // interleave, BLOCK_TOKENS, interleave)
    return keys, (*blocks, BLOCK_TOKENS // interleave, group.value_dim, interleave)
