"""The second step of decode: how the keys of a row are divided among splits, and the kernel that merges their results.

A split leaves the mean of its values in `partial`, and log2 of its sum of weights in `logs`, -inf for a query that sees
none of its keys. Rows with a single split need no merging: `attention_kernels.decode_kernel` writes their results.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from srv_kernels.triton.numerics import store


@triton.jit
def first_visible(position, window, chunk, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """The position of the first key that a query at `position` sees."""
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(position - window + 1, 0)
    if HAS_CHUNK:
        low = tl.maximum(tl.maximum(position, 0) // chunk * chunk, low)
    return low


@triton.jit
def divide(length, low, splits, least_blocks, BLOCK_KEYS: tl.constexpr):
    """The blocks per split of the keys from `low` on, and the splits that have any (at least one)."""
    blocks = tl.cdiv(length, BLOCK_KEYS) - low // BLOCK_KEYS
    share = tl.maximum(tl.cdiv(blocks, splits), least_blocks)
    return share, tl.maximum(tl.cdiv(blocks, share), 1)


@triton.jit(
    do_not_specialize=["splits", "least_blocks", "max_queries", "window", "chunk"],
    do_not_specialize_on_alignment=["lengths"],
)
def reduce_kernel(
    partial,
    logs,
    starts,
    lengths,
    out,
    splits,
    least_blocks,
    max_queries,
    window,
    chunk,
    out_token,
    out_head,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """Grid: (rows * max_queries, KV heads). The mean of the splits' results, by their sums of weights."""
    row = tl.program_id(0) // max_queries
    index = tl.program_id(0) % max_queries
    begin = tl.load(starts + row)
    queries = tl.load(starts + row + 1) - begin
    length = tl.load(lengths + row)
    low = first_visible(length - queries, window, chunk, HAS_WINDOW, HAS_CHUNK)
    _, active = divide(length, low, splits, least_blocks, BLOCK_KEYS)
    if index >= queries or queries > max_queries or active == 1:
        return

    h = tl.arange(0, BLOCK_HEADS)
    head = tl.program_id(1) * GROUP + h
    place = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) * GROUP + head) * splits
    at = tl.arange(0, BLOCK_SPLITS)
    exists = (h[:, None] < GROUP) & (at[None, :] < active)
    seen = tl.load(logs + place[:, None] + at[None, :], mask=exists, other=float("-inf"))
    largest = tl.max(seen, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    dims = tl.arange(0, BLOCK_VALUE)
    inside = (h[:, None] < GROUP) & (dims[None, :] < VALUE_DIM)
    acc = tl.zeros((BLOCK_HEADS, BLOCK_VALUE), tl.float32)
    for split in range(0, active):
        weight = tl.exp2(tl.load(logs + place + split, mask=h < GROUP, other=float("-inf")) - largest)
        part = tl.load(partial + (place + split)[:, None] * VALUE_DIM + dims[None, :], mask=inside, other=0.0)
        total += weight  # in the order of the splits, so that it does not depend on BLOCK_SPLITS
        acc += weight[:, None] * part
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    token = (begin + index).to(tl.int64)
    store(out + (token * out_token + head * out_head)[:, None] + dims[None, :], acc, mask=inside)
