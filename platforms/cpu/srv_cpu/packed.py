"""The KV pool order of the native kernels. Imports no torch, since the facts name the order.

Within a page, the keys of a head are [blocks of 16 tokens, dim / n, 16, n] and its values [blocks, 16 / n, dim, n],
with n = `INTERLEAVE` of the pool's dtype, so that one dot product serves both. A block of int8 is followed by the
scales of its tokens, float32 [16]: see native/kv_layout.h.
"""

from __future__ import annotations

from srv.errors import InternalError
from srv.specs import SCALE_BYTES, AttentionSpec, KVLayout, TensorShape, spec_name
from srv_kernels.cpu.library import BLOCK_TOKENS, MAX_HEAD_DIM

ORDER = "page_head_packed"
PAGE_SIZES = (16, 32, 64, 128, 256)
TRAITS = ("window", "soft_cap", "chunks", "sinks", "temperature")  # of layers, in the native kernel of paged attention
TORCH_TRAITS = (*TRAITS, "alibi", "bidirectional", "relative_bias")  # in attention with torch operators
COLUMNS = 16  # head sizes must be multiples of this
INTERLEAVE = {"float32": 1, "float16": 1, "bfloat16": 2, "int8": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}


def head_dim_reason(dim: int) -> str | None:
    """Why the kernels cannot compute with heads of this size; None if they can."""
    if dim % COLUMNS or dim > MAX_HEAD_DIM:
        return f"head dim {dim} is not a multiple of {COLUMNS} up to {MAX_HEAD_DIM}"
    return None


def latent_reason(latent_dim: int, rope_dim: int) -> str | None:
    """Why the kernel of latent attention cannot compute with vectors of these sizes; None if it can."""
    if latent_dim % COLUMNS or rope_dim % COLUMNS:
        return (
            f"latent attention with {latent_dim} + {rope_dim} numbers per token: each must be a multiple of {COLUMNS}"
        )
    return None


def tensors(layout: KVLayout, pages: int) -> dict[str, TensorShape]:
    """A layer's keys and values in this order, in a pool of `pages` pages and page 0.

    For int8, the last axis contains a block's values and then their scales. Raises InternalError for a group without
    keys and values.
    """
    group, interleave = layout.group, INTERLEAVE[layout.dtype]
    if not isinstance(group, AttentionSpec):
        raise InternalError(f"a {spec_name(group)} cache group has no keys and values to pack")
    blocks = (pages + 1, group.kv_heads, layout.page_size // BLOCK_TOKENS)
    if layout.dtype == "int8":
        ends = ((BLOCK_TOKENS * (dim + SCALE_BYTES),) for dim in (group.key_dim, group.value_dim))
        keys, values = ((*blocks, *end) for end in ends)
    else:
        keys = (*blocks, group.key_dim // interleave, BLOCK_TOKENS, interleave)
        values = (*blocks, BLOCK_TOKENS // interleave, group.value_dim, interleave)
    return {"key": TensorShape(keys, layout.dtype), "value": TensorShape(values, layout.dtype)}
