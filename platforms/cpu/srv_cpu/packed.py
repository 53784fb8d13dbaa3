"""The order of a KV pool that native kernels read. Imports no torch: facts name it.

Keys of one head lie as [blocks of 16 tokens, dim / 2, 16, 2] within a page, values as [blocks, 8, dim, 2], so that one
product of the processor serves weights, keys and values alike.
"""

from __future__ import annotations

from srv.memory.layout import KVLayout
from srv_kernels.cpu.library import BLOCK_TOKENS

ORDER = "page_head_packed"
PAGE_SIZES = (16, 32, 64, 128, 256)
COLUMNS = 16  # a head is worked through so many columns at a time


def shapes(layout: KVLayout, pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one layer's key and value buffer in this order, `pages` counting page 0 too."""
    group, blocks = layout.group, layout.page_size // BLOCK_TOKENS
    keys = (pages, group.kv_heads, blocks, group.key_dim // 2, BLOCK_TOKENS, 2)
    return keys, (pages, group.kv_heads, blocks, BLOCK_TOKENS // 2, group.value_dim, 2)
