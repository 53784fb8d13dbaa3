"""Paged attention as operators: `paged_extend` for prompts, `paged_decode` for rows with few query tokens.

Both read a pool in order "page_token_head", which already holds the keys and values of this step, and write `out`.

    q                      [tokens, heads, key_dim], float32, bfloat16 or float16; the last axis contiguous
    keys, values           [pages + 1, page_size, kv_heads, key_dim or value_dim], any strides but for the last axis
    page_table             int32 [rows, columns], the last axis contiguous; page 0 is padding
    starts                 int32 [rows + 1]: the tokens of row i are [starts[i], starts[i + 1])
    lengths                int32 [rows]: tokens of the row, those of this step included
    out                    [tokens, heads, value_dim]; the last axis contiguous
    sinks                  None, or float32 [heads], contiguous: a score of each head that has no value
    key_scale, value_scale None, or float32: one element, or [pages + 1, page_size, kv_heads], any strides. A stored
                           vector is multiplied by its scale

The pool has any float dtype, float8 included, or int8 with scales per token. Its elements are converted to q's dtype,
which holds float8 and int8 exactly. A uint8 pool holds the codes of float8 e4m3fn (`torch.Tensor.view`), for targets
that have no instruction for them.

A mixed step is two launches over the same tensors: `paged_decode` skips rows with more than `queries` query tokens, and
`paged_extend` those with fewer than `min_queries`. `starts`, `lengths` and `page_table` may also be slices, of
consecutive rows. Grids depend on shapes alone. Rows in page 0 only, as in captured steps, get zeros. Keys and values
that no query of a row may see do not change its result, NaN included; NaN in those that only some of its queries see
may reach the others.

The floor of a decode step is the traffic of its keys and values:

    bytes     rows * length * kv_heads * (key_dim + value_dim) * item size      (+ 8 bytes per vector pair with scales)
    partial   rows * heads * splits * (value_dim + 1) * 4, written and read once, if splits > 1
    table     4 bytes per page and KV head, of which all but the first come from the L2 cache

Llama 3 8B, bfloat16, 32 rows of 8,192 tokens: 1.07 GB per layer, 0.32 ms at 3.35 TB/s; 1 split suffices on 132 compute
units (256 programs), and with 1 row, 33 splits have a partial traffic of 1.1 MB beside 33.6 MB. Padding of heads to a
power of two (80, 96, 112) costs products and registers and no traffic.

Not measured on a device yet. Expected are, in decode, 75 to 90 % of the bandwidth (60 to 80 % with pages of one token,
which gather vectors of 2 * dim bytes); in extend, 50 to 65 % of the dense peak on sm80 and sm89, and 35 to 50 % on sm90
and gfx942, where pages that are gathered cannot use the bulk copies of the hardware. A GPU must confirm the block sizes
of `attention_tuning`, `SPLIT_TOKENS` and `Limits.programs`; that conversions of int8 and float8 hide behind loads; and
that looking up pages per token (and not per page) does not stall the pipeline.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor

from srv_kernels.triton import attention_kernels as kernels
from srv_kernels.triton.attention_plan import tile_rows, tiles
from srv_kernels.triton.attention_reduce import reduce_kernel
from srv_kernels.triton.registration import triton_op

_LOG2_E = 1 / math.log(2)
_SHARED = (
    "Tensor q, Tensor keys, Tensor values, Tensor page_table, Tensor starts, Tensor lengths, Tensor(a!) out, "
    "float scale, int? window, int? chunk, float? soft_cap, int? temperature_from, Tensor? sinks, Tensor? key_scale, "
    "Tensor? value_scale, int[] blocks"
)


@triton_op(f"paged_extend({_SHARED}, int min_queries=1) -> ()")
def paged_extend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    temperature_from: int | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    blocks: Sequence[int],
    min_queries: int = 1,
) -> None:
    """Causal attention of rows of any lengths, those with at least `min_queries` query tokens.

    Tensors: see the module. `scale` multiplies q.k. `window`: None, or a token attends to itself and the window - 1
    tokens before it. `chunk`: None, or a token attends only to those of its own chunk of so many positions. `soft_cap`:
    None, or scores become soft_cap * tanh(scores / soft_cap). `temperature_from`: None, or scores of a query at a
    position p beyond this n are multiplied by ln(p) / ln(n) after that. `blocks`: from `attention_plan.extend_blocks`.
    """
    rows, group = len(lengths), q.shape[1] // keys.shape[2]
    if not rows or not len(q):
        return
    most, block_keys, warps, stages = blocks
    block_rows = tile_rows(group, most, most)
    grid = (len(q) // (block_rows // group) + rows, keys.shape[2])
    kernels.extend_kernel[grid](
        *_pool(q, keys, values, key_scale, value_scale, sinks),
        page_table,
        starts,
        lengths,
        out,
        rows,
        min_queries,
        *_scores(scale, window, chunk, soft_cap, temperature_from),
        *_strides(q, out, page_table, keys, values, key_scale, value_scale),
        **_constants(q, keys, values, key_scale, value_scale, window, chunk, soft_cap, temperature_from, sinks),
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=block_keys,
        num_warps=warps,
        num_stages=stages,
    )


@triton_op(f"paged_decode({_SHARED}, Tensor(b!) partial, Tensor(c!) logs, int[] sizes) -> ()")
def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    temperature_from: int | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    blocks: Sequence[int],
    partial: Tensor,
    logs: Tensor,
    sizes: Sequence[int],
) -> None:
    """Causal attention of rows with few query tokens, whose keys are divided among programs (Flash-Decoding).

    Arguments: see `paged_extend`. `sizes`: queries, splits and least_blocks of the `attention_plan.DecodePlan` that
    also has `blocks`; rows with more than `queries` query tokens are skipped. `partial`, `logs`: float32 workspaces of
    `DecodePlan.partial_shape`, contiguous, for at least this many rows; their contents do not matter.
    """
    queries, splits, least_blocks = sizes
    rows, (heads, kv_heads) = len(lengths), (q.shape[1], keys.shape[2])
    if not rows or not len(q):
        return
    group = heads // kv_heads
    most, block_keys, warps, stages = blocks
    block_rows = tile_rows(group, queries * group, most)
    constants = _constants(q, keys, values, key_scale, value_scale, window, chunk, soft_cap, temperature_from, sinks)
    scores = _scores(scale, window, chunk, soft_cap, temperature_from)
    count = tiles(queries, group, (block_rows,))
    kernels.decode_kernel[kv_heads * count, splits, rows](
        *_pool(q, keys, values, key_scale, value_scale, sinks),
        page_table,
        starts,
        lengths,
        out,
        partial,
        logs,
        least_blocks,
        queries,
        *scores,
        *_strides(q, out, page_table, keys, values, key_scale, value_scale),
        **constants,
        TILES=count,
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=block_keys,
        num_warps=warps,
        num_stages=stages,
    )
    if splits == 1:
        return
    reduce_kernel[rows * queries, kv_heads](
        partial,
        logs,
        starts,
        lengths,
        out,
        splits,
        least_blocks,
        queries,
        *scores[-2:],
        out.stride(0),
        out.stride(1),
        GROUP=group,
        VALUE_DIM=constants["VALUE_DIM"],
        BLOCK_HEADS=triton.next_power_of_2(group),
        BLOCK_VALUE=constants["BLOCK_VALUE"],
        BLOCK_KEYS=block_keys,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        HAS_WINDOW=window is not None,
        HAS_CHUNK=chunk is not None,
        num_warps=min(4, triton.next_power_of_2(group)),
    )


def _pool(q: Tensor, keys: Tensor, values: Tensor, *unless_none: Tensor | None) -> tuple[Tensor, ...]:
    # A pointer that is not read must be some tensor.
    return q, keys, values, *(q if scale is None else scale for scale in unless_none)


def _scores(
    scale: float, window: int | None, chunk: int | None, soft_cap: float | None, temperature_from: int | None
) -> tuple[float, float, int, int, int]:
    """What the kernels call scale, cap, temperature_from, window and chunk."""
    factor = scale * _LOG2_E if soft_cap is None else 2 * scale * _LOG2_E / soft_cap
    return factor, (soft_cap or 0.0) * _LOG2_E, temperature_from or 0, window or 0, chunk or 0


def _strides(
    q: Tensor, out: Tensor, table: Tensor, keys: Tensor, values: Tensor, *scales: Tensor | None
) -> tuple[int, ...]:
    strides = (*q.stride()[:2], *out.stride()[:2], table.stride(0), *keys.stride()[:3], *values.stride()[:3])
    for scale in scales:
        strides += scale.stride() if _scale_kind(scale) == 2 else (0, 0, 0)
    return strides


def _constants(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    temperature_from: int | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    key_dim, value_dim = q.shape[2], values.shape[3]
    return {
        "GROUP": q.shape[1] // keys.shape[2],
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEY": max(16, triton.next_power_of_2(key_dim)),
        "BLOCK_VALUE": max(16, triton.next_power_of_2(value_dim)),
        "PAGE_SIZE": keys.shape[1],
        "KEY_SCALES": _scale_kind(key_scale),
        "VALUE_SCALES": _scale_kind(value_scale),
        "HAS_WINDOW": window is not None,
        "HAS_CHUNK": chunk is not None,
        "HAS_CAP": soft_cap is not None,
        "HAS_TEMPERATURE": temperature_from is not None,
        "HAS_SINKS": sinks is not None,
    }


def _scale_kind(scale: Tensor | None) -> int:
    """0: none, 1: one for the whole pool, 2: one per token and KV head."""
    return 0 if scale is None else 1 if scale.numel() == 1 else 2
