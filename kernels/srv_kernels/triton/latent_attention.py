"""Paged multi-head latent attention, absorbed, as an operator: all heads attend to the same compressed vectors.

    q_latent         [tokens, heads, L], queries times the up-projection of keys; float32, bfloat16 or float16
    q_rope           [tokens, heads, R], rotated, of q_latent's dtype; the last axis of each contiguous
    latents, ropes   [pages + 1, page_size, L or R], contiguous, with the vectors of this step; any float dtype
    page_table       int32 [rows, columns], the last axis contiguous; page 0 is padding
    starts           int32 [rows + 1]: the tokens of row i are [starts[i], starts[i + 1])
    lengths          int32 [rows]: tokens of the row, those of this step included
    out              [tokens, heads, L]: weighted compressed vectors, which the up-projection of values makes results

A tile is `BLOCK_ROWS` pairs of a query and a head of one row, in the order of the queries, so that a vector that was
read serves all of them, as key and as value. Where no row has more than one query, its keys are divided among splits,
which `attention_reduce` merges. Scores are in units of log2; sums are float32. Rows in page 0 only, as in captured
steps, get zeros, and what is beyond a row's length, NaN included, has no effect.

The floor of a decode step is the traffic of the vectors, rows * length * (L + R) * item size: for DeepSeek-V3 1,152
bytes per token and layer in bfloat16, read once per tile of heads, of which all but the first come from the L2 cache.
Not measured on a device yet: a GPU must confirm the sizes of `launch_sizes`.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.attention_reduce import divide, reduce_kernel
from srv_kernels.triton.attention_tuning import MOST_SPLITS, PROGRAMS, SPLIT_TOKENS
from srv_kernels.triton.numerics import dot, round_to, store, widen
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.variants import FLOATS, Variant, pointers

_LOG2_E = 1 / math.log(2)
LARGEST = 1024  # numbers of a compressed vector, and of a rotary key


class LatentSizes(NamedTuple):
    """`rows`: pairs of query and head per tile. `keys`: per step of the softmax."""

    rows: int
    keys: int
    warps: int
    stages: int


def launch_sizes(queries: int, latent_dim: int, item_size: int) -> LatentSizes:
    """`queries`: the most query tokens of a row. `item_size`: bytes per element of the queries."""
    wide = item_size == 4 or latent_dim > 512
    return LatentSizes(
        16 if queries == 1 or wide else 32, 16 if wide else 32, 4 if queries == 1 else 8, 1 if wide else 2
    )


def latent_splits(
    rows: int, queries: int, heads: int, longest: int, units: int, sizes: LatentSizes, most: int = MOST_SPLITS
) -> int:
    """Into how many parts the keys of a row are divided, at most `most`; `units`: the compute units of the device."""
    if queries > 1:
        return 1
    programs = max(1, rows) * -(-heads // sizes.rows)
    return max(1, min(round(PROGRAMS * units / programs), -(-longest // SPLIT_TOKENS), most))


@triton.jit
def _load_vectors(pool, where, exists, SIZE: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    dims = tl.arange(0, BLOCK)
    mask = exists[:, None] & (dims[None, :] < SIZE)
    found = tl.load(pool + where[:, None] * SIZE + dims[None, :], mask=mask, other=0.0)
    if found.dtype == dtype:
        return found
    return round_to(widen(found), dtype)


@triton.jit(
    do_not_specialize=["splits", "least_blocks", "max_queries", "table_row"], do_not_specialize_on_alignment=["lengths"]
)
def latent_kernel(
    q_latent,
    q_rope,
    latents,
    ropes,
    page_table,
    starts,
    lengths,
    out,
    partial,
    logs,
    splits,
    least_blocks,
    max_queries,
    scale,
    latent_token,
    latent_head,
    rope_token,
    rope_head,
    out_token,
    out_head,
    table_row,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Grid: (tiles of the longest row, splits, rows)."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    begin = tl.load(starts + row)
    queries = tl.load(starts + row + 1) - begin
    length = tl.load(lengths + row)
    share, active = divide(length, 0, splits, least_blocks, BLOCK_KEYS)
    if tile * BLOCK_ROWS >= queries * HEADS or split >= active:
        return

    m = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    index = m // HEADS
    head = m % HEADS
    inside = index < queries
    token = (begin + index).to(tl.int64)
    latent_dims = tl.arange(0, BLOCK_LATENT)
    rope_dims = tl.arange(0, BLOCK_ROPE)
    where = q_latent + (token * latent_token + head * latent_head)[:, None] + latent_dims[None, :]
    query = tl.load(where, mask=inside[:, None] & (latent_dims[None, :] < LATENT), other=0.0)
    where = q_rope + (token * rope_token + head * rope_head)[:, None] + rope_dims[None, :]
    rotated = tl.load(where, mask=inside[:, None] & (rope_dims[None, :] < ROPE), other=0.0)
    dtype: tl.constexpr = query.dtype

    positions = tl.where(inside, length - queries + index, -1)
    last = tl.minimum(((tile + 1) * BLOCK_ROWS - 1) // HEADS, queries - 1)
    first = split * share * BLOCK_KEYS
    end = tl.minimum(first + share * BLOCK_KEYS, length - queries + last + 1)
    table = page_table + row.to(tl.int64) * table_row
    acc = tl.zeros((BLOCK_ROWS, BLOCK_LATENT), tl.float32)
    largest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(first, end, BLOCK_KEYS):
        tokens = start + tl.arange(0, BLOCK_KEYS)
        exists = tokens < end
        pages = tl.load(table + tokens // PAGE_SIZE, mask=exists, other=0)
        exists = exists & (pages != 0)
        slots = pages.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE
        latent = _load_vectors(latents, slots, exists, LATENT, BLOCK_LATENT, dtype)
        rope = _load_vectors(ropes, slots, exists, ROPE, BLOCK_ROPE, dtype)
        scores = dot(query, tl.trans(latent), tl.zeros((BLOCK_ROWS, BLOCK_KEYS), tl.float32))
        scores = dot(rotated, tl.trans(rope), scores) * scale
        visible = exists[None, :] & (tokens[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        # While a query has seen no key, `new` is -inf, and -inf - -inf would be NaN.
        finite = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(largest - finite)
        total = total * shrink + tl.sum(weights, 1)
        largest = new
        acc = dot(round_to(weights, dtype), latent, acc * shrink[:, None])

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = inside[:, None] & (latent_dims[None, :] < LATENT)
    if active == 1:
        store(out + (token * out_token + head * out_head)[:, None] + latent_dims[None, :], result, mask=mask)
    else:
        place = ((row.to(tl.int64) * max_queries + index) * HEADS + head) * splits + split
        store(partial + place[:, None] * LATENT + latent_dims[None, :], result, mask=mask)
        store(logs + place, largest + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=inside)


@triton_op(
    "paged_latent(Tensor q_latent, Tensor q_rope, Tensor latents, Tensor ropes, Tensor page_table, Tensor starts, "
    "Tensor lengths, Tensor(a!) out, float scale, int queries, int splits, int[] sizes, Tensor(b!) partial, "
    "Tensor(c!) logs) -> ()"
)
def paged_latent(
    q_latent: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    ropes: Tensor,
    page_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    queries: int,
    splits: int,
    sizes: Sequence[int],
    partial: Tensor,
    logs: Tensor,
) -> None:
    """Causal latent attention of rows with up to `queries` query tokens; tensors: see the module.

    `scale` multiplies scores. `splits`: from `latent_splits`, 1 if `queries` is more. `sizes`: from `launch_sizes`.
    `partial`, `logs`: float32 workspaces [rows * queries, heads, splits, L] and without L, contiguous, not read if
    `splits` is 1.
    """
    rows, heads = len(lengths), q_latent.shape[1]
    if not rows or not len(q_latent):
        return
    block_rows, block_keys, warps, stages = sizes
    latent, rope = q_latent.shape[2], q_rope.shape[2]
    least = max(1, SPLIT_TOKENS // block_keys)
    latent_kernel[triton.cdiv(queries * heads, block_rows), splits, rows](
        q_latent,
        q_rope,
        latents,
        ropes,
        page_table,
        starts,
        lengths,
        out,
        partial,
        logs,
        splits,
        least,
        queries,
        scale * _LOG2_E,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        *out.stride()[:2],
        page_table.stride(0),
        HEADS=heads,
        LATENT=latent,
        ROPE=rope,
        BLOCK_LATENT=_block(latent),
        BLOCK_ROPE=_block(rope),
        PAGE_SIZE=latents.shape[1],
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=block_keys,
        num_warps=warps,
        num_stages=stages,
    )
    if splits == 1:
        return
    group = math.gcd(heads, 4)
    reduce_kernel[rows * queries, heads // group](
        partial,
        logs,
        starts,
        lengths,
        out,
        splits,
        least,
        queries,
        0,
        0,
        *out.stride()[:2],
        GROUP=group,
        VALUE_DIM=latent,
        BLOCK_HEADS=group,
        BLOCK_VALUE=_block(latent),
        BLOCK_KEYS=block_keys,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        HAS_WINDOW=False,
        HAS_CHUNK=False,
        num_warps=4,
    )


def _block(size: int) -> int:
    """Products need blocks of at least 16."""
    return max(16, triton.next_power_of_2(size))


_STRIDES = ("latent_token", "latent_head", "rope_token", "rope_head", "out_token", "out_head")


def _variants():
    for kind in FLOATS:
        types = pointers(
            {
                **dict.fromkeys(("q_latent", "q_rope", "latents", "ropes"), kind),
                **dict.fromkeys(("page_table", "starts", "lengths"), "i32"),
                **{"out": kind, "partial": "fp32", "logs": "fp32"},
            },
            *("splits", "least_blocks", "max_queries"),
        )
        types |= {"scale": "fp32", **dict.fromkeys((*_STRIDES, "table_row"), "i32")}
        for queries in (1, 2):
            rows, keys, warps, stages = launch_sizes(queries, 512, 4 if kind == "fp32" else 2)
            constants = {"HEADS": 128, "LATENT": 512, "ROPE": 64, "BLOCK_LATENT": 512, "BLOCK_ROPE": 64}
            constants |= {"PAGE_SIZE": 64, "BLOCK_ROWS": rows, "BLOCK_KEYS": keys}
            yield Variant(latent_kernel, types, constants, aligned=_STRIDES, warps=warps, stages=stages)


VARIANTS = tuple(_variants())
