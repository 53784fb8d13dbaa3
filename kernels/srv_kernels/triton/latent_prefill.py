"""Multi-head latent attention of prompts, materialised, as an operator: every head has its own keys and values.

    q          [tokens, heads, K + R], the last R elements rotated; float32, bfloat16 or float16
    heads      [keys, heads, K + V] of q's dtype: the keys and values of each head, compressed vectors times the
               up-projection
    ropes      [keys, R] of q's dtype, the rotated part of the keys, which all heads share
    segments   int32 [n, 4]: tokens [begin, end) of a row, and the keys [begin, end) that these attend to
    tiles      int32 [m, 2]: a segment, and where a tile of `PrefillSizes.rows` tokens begins in it
    out        [tokens, heads, V]: the weighted means of values, of q's dtype, or float32 if others follow
    logs       float32 [tokens, heads]: log2 of the sums of weights, contiguous; None if no other part follows

The last axis of every tensor is contiguous. Keys come in parts, so that those in the cache need memory for one part
only. The first call is causal: the keys of a segment are those of its own tokens. Each further call adds keys before
them, which all tokens see: it begins with the results and logs so far, as the online softmax of one loop would.

Where rows have many tokens, this takes fewer products than absorbing: for DeepSeek-V3, per query, key and head,
192 + 128 and not 576 + 512; and 512 * 256 per key and head for the up-projection.
Not measured on a device yet: a GPU must confirm the sizes of `prefill_sizes`.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import dot, round_to, store
from srv_kernels.triton.registration import INTERPRETED, triton_op
from srv_kernels.triton.targets import BY_NAME
from srv_kernels.triton.variants import Variant

_LOG2_E = 1 / math.log(2)
LARGEST_HEAD = 256  # numbers of a key without its rotated part, of that part, and of a value


class PrefillSizes(NamedTuple):
    """`rows`: tokens per tile. `keys`: per step of the softmax."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_sizes(target: str, largest: int, item_size: int) -> PrefillSizes:
    """For a device that is called `target` in `targets`, so that few targets need spills.

    `largest`: numbers of a key or value, the more of both. `item_size`: bytes per element of the queries.
    """
    if INTERPRETED:
        return PrefillSizes(128, 128, 1, 1)
    if target == "gfx1100":
        return PrefillSizes(32, 16, 8, 1 if item_size == 4 else 2)
    if item_size == 4:
        return PrefillSizes(32, 16, 8, 1)
    return PrefillSizes(64, 32, 8, 2) if largest > 128 else PrefillSizes(128, 32, 8, 2)


@triton.jit
def _attend(
    acc,  # [rows of the tile, BLOCK_VALUE] float32: sum of weights times values
    largest,  # [rows of the tile] float32: the largest score so far
    total,  # [rows of the tile] float32: sum of weights
    plain,
    rotated,
    index,  # of the tile's tokens in their segment
    first,
    end,
    keys,
    ropes,
    key_token,
    rope_token,
    scale,
    KEY: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys [first, end) of the segment, whole blocks unless `MASKED`."""
    key_dims = tl.arange(0, BLOCK_KEY)
    rope_dims = tl.arange(0, BLOCK_ROPE)
    value_dims = tl.arange(0, BLOCK_VALUE)
    for start in range(first, end, BLOCK_KEYS):
        at = start + tl.arange(0, BLOCK_KEYS)
        exists = at < end
        place = keys + at.to(tl.int64)[:, None] * key_token
        mask = (key_dims < KEY)[None, :]
        key = tl.load(place + key_dims[None, :], mask=(exists[:, None] & mask) if MASKED else mask, other=0.0)
        where = ropes + at.to(tl.int64)[:, None] * rope_token + rope_dims[None, :]
        mask = (rope_dims < ROPE)[None, :]
        rope = tl.load(where, mask=(exists[:, None] & mask) if MASKED else mask, other=0.0)
        scores = dot(plain, tl.trans(key), tl.zeros((BLOCK_ROWS, BLOCK_KEYS), tl.float32))
        scores = dot(rotated, tl.trans(rope), scores) * scale
        if MASKED:
            visible = exists[None, :]
            if CAUSAL:
                visible = visible & (at[None, :] <= index[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        # Every token has seen a key, so that `new` is finite: in the first step, key 0.
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        largest = new
        mask = (value_dims < VALUE)[None, :]
        value = tl.load(place + KEY + value_dims[None, :], mask=(exists[:, None] & mask) if MASKED else mask, other=0.0)
        acc = dot(round_to(weights, plain.dtype), value, acc * shrink[:, None])
    return acc, largest, total


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def prefill_kernel(
    q,
    heads,
    ropes,
    segments,
    tiles,
    out,
    logs,
    scale,
    q_token,
    q_head,
    key_token,
    key_head,
    rope_token,
    out_token,
    out_head,
    KEY: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_LOGS: tl.constexpr,
):
    """Grid: (tiles, heads). Calls that are not causal continue from `out` and `logs`."""
    tile = tiles + tl.program_id(0) * 2
    head = tl.program_id(1)
    segment = segments + tl.load(tile) * 4
    first = tl.load(tile + 1)
    begin = tl.load(segment)
    queries = tl.load(segment + 1) - begin
    key_begin = tl.load(segment + 2)
    count = tl.load(segment + 3) - key_begin
    if count <= 0:
        return

    index = first + tl.arange(0, BLOCK_ROWS)
    inside = (index < queries)[:, None]
    token = (begin + index).to(tl.int64)
    key_dims = tl.arange(0, BLOCK_KEY)
    rope_dims = tl.arange(0, BLOCK_ROPE)
    value_dims = tl.arange(0, BLOCK_VALUE)
    where = q + (token * q_token + head * q_head)[:, None]
    plain = tl.load(where + key_dims[None, :], mask=inside & (key_dims < KEY)[None, :], other=0.0)
    rotated = tl.load(where + KEY + rope_dims[None, :], mask=inside & (rope_dims < ROPE)[None, :], other=0.0)
    result = out + (token * out_token + head * out_head)[:, None] + value_dims[None, :]
    written = inside & (value_dims < VALUE)[None, :]
    log = logs + token * tl.num_programs(1) + head
    if CAUSAL:
        acc = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)
        largest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        whole = (first + 1) // BLOCK_KEYS * BLOCK_KEYS
        end = tl.minimum(first + BLOCK_ROWS, count)
    else:
        acc = tl.load(result, mask=written, other=0.0)
        largest = tl.load(log, mask=index < queries, other=0.0)
        total = tl.full((BLOCK_ROWS,), 1.0, tl.float32)
        whole = count // BLOCK_KEYS * BLOCK_KEYS
        end = count
    keys = heads + key_begin.to(tl.int64) * key_token + head * key_head
    rotary = ropes + key_begin.to(tl.int64) * rope_token
    acc, largest, total = _attend(
        acc, largest, total, plain, rotated, index, 0, whole, keys, rotary, key_token, rope_token, scale,
        KEY, ROPE, VALUE, BLOCK_KEY, BLOCK_ROPE, BLOCK_VALUE, BLOCK_ROWS, BLOCK_KEYS, CAUSAL, False,
    )  # fmt: skip
    acc, largest, total = _attend(
        acc, largest, total, plain, rotated, index, whole, end, keys, rotary, key_token, rope_token, scale,
        KEY, ROPE, VALUE, BLOCK_KEY, BLOCK_ROPE, BLOCK_VALUE, BLOCK_ROWS, BLOCK_KEYS, CAUSAL, True,
    )  # fmt: skip
    store(result, acc / total[:, None], mask=written)
    if WITH_LOGS:
        store(log, largest + tl.log2(total), mask=index < queries)


@triton_op(
    "latent_prefill(Tensor q, Tensor heads, Tensor ropes, Tensor segments, Tensor tiles, Tensor(a!) out, "
    "Tensor(b!)? logs, float scale, bool first, int[] sizes) -> ()"
)
def latent_prefill(
    q: Tensor,
    heads: Tensor,
    ropes: Tensor,
    segments: Tensor,
    tiles: Tensor,
    out: Tensor,
    logs: Tensor | None,
    scale: float,
    first: bool,
    sizes: Sequence[int],
) -> None:
    """Attention over one part of the keys; tensors: see the module.

    `scale` multiplies scores. `first`: causal; what `out` and `logs` hold is not read. `sizes`: from `prefill_sizes`.
    Tokens of no tile, and of a segment without keys, keep their results.
    """
    if not len(tiles):
        return
    rope = ropes.shape[1]
    key = q.shape[2] - rope
    value = heads.shape[2] - key
    block_rows, block_keys, warps, stages = sizes
    prefill_kernel[len(tiles), q.shape[1]](
        q,
        heads,
        ropes,
        segments,
        tiles,
        out,
        out if logs is None else logs,
        scale * _LOG2_E,
        *q.stride()[:2],
        *heads.stride()[:2],
        ropes.stride(0),
        *out.stride()[:2],
        KEY=key,
        ROPE=rope,
        VALUE=value,
        BLOCK_KEY=_block(key),
        BLOCK_ROPE=_block(rope),
        BLOCK_VALUE=_block(value),
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=block_keys,
        CAUSAL=first,
        WITH_LOGS=logs is not None,
        num_warps=warps,
        num_stages=stages,
    )


def _block(size: int) -> int:
    """Products need blocks of at least 16."""
    return max(16, triton.next_power_of_2(size))


_STRIDES = ("q_token", "q_head", "key_token", "key_head", "rope_token", "out_token", "out_head")


def _variants():
    sizes = {(prefill_sizes(target, 128, size), size) for target in BY_NAME for size in (2, 4)}
    for blocks, item_size in sorted(sizes):
        users = frozenset(name for name in BY_NAME if prefill_sizes(name, 128, item_size) == blocks)
        constants = {"KEY": 128, "ROPE": 64, "VALUE": 128, "BLOCK_KEY": 128, "BLOCK_ROPE": 64, "BLOCK_VALUE": 128}
        constants |= {"BLOCK_ROWS": blocks.rows, "BLOCK_KEYS": blocks.keys}
        for kind in ("fp32",) if item_size == 4 else ("bf16", "fp16"):
            for causal, with_logs in ((True, False), (True, True), (False, True)):
                types = {
                    **dict.fromkeys(("q", "heads", "ropes"), f"*{kind}"),
                    **dict.fromkeys(("segments", "tiles"), "*i32"),
                    **dict.fromkeys(("out", "logs"), "*fp32" if with_logs else f"*{kind}"),
                    **{"scale": "fp32", **dict.fromkeys(_STRIDES, "i32")},
                }
                traits = {"CAUSAL": causal, "WITH_LOGS": with_logs}
                yield Variant(
                    prefill_kernel,
                    types,
                    constants | traits,
                    aligned=_STRIDES,
                    warps=blocks.warps,
                    stages=blocks.stages,
                    targets=users,
                )


VARIANTS = tuple(_variants())
