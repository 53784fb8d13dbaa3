"""The pairs of a token and an expert, sorted by expert and padded to whole blocks of rows, without waiting for them.

    ids            e1 e0 │ e1 e2 │ e1 e1        pairs 0 to 5 of three tokens with two experts each
    sorted         1 · │ 0 2 │ 4 5 │ 3 ·        blocks of two rows; · is a hole, whose number is the count of pairs
    block_expert   e0  │ e1  │ e1  │ e2 │ -1    -1 for blocks that are not used

How many blocks there are depends on the ids, and their upper bound on shapes alone, so that launches need no value from
the device and can be captured. Pairs of an expert stay in order. Ids outside [0, E) are in no block.

    count    one program per expert: how many pairs it has
    place    one program per expert: where its blocks begin, and its pairs in order
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import store
from srv_kernels.triton.variants import Variant, pointers

_BLOCK = 1024  # pairs per step


class Alignment(NamedTuple):
    """sorted: int32 [blocks · rows], pairs; block_expert: int32 [blocks]; rows: of a block."""

    sorted: Tensor
    block_expert: Tensor
    rows: int


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(ids, counts, pairs, BLOCK: tl.constexpr):
    """counts int32 [E]: how often each id occurs."""
    expert = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
    store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["pairs", "blocks"])
def place_kernel(
    ids,
    counts,
    sorted_pairs,
    block_expert,
    pairs,
    E,
    blocks,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per expert, and a last one for the blocks that no expert uses."""
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    found = tl.load(counts + experts, mask=experts < E, other=0)
    needed = (found + ROWS - 1) // ROWS
    first = tl.sum(tl.where(experts < expert, needed, 0), axis=0)
    mine = tl.sum(tl.where(experts == expert, found, 0), axis=0)
    last = tl.where(expert < E, first + (mine + ROWS - 1) // ROWS, blocks)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        store(block_expert + at, tl.where(expert < E, expert, -1) + tl.zeros([BLOCK], tl.int32), mask=at < last)
    if expert < E:
        begin = first * ROWS
        for start in range(0, pairs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            is_mine = tl.load(ids + at, mask=at < pairs, other=-1) == expert
            order = tl.cumsum(is_mine.to(tl.int32), axis=0)
            store(sorted_pairs + begin + order - 1, at, mask=is_mine)
            begin += tl.sum(is_mine.to(tl.int32), axis=0)
        holes = begin + tl.arange(0, ROWS)
        store(sorted_pairs + holes, pairs + tl.zeros([ROWS], tl.int32), mask=holes < last * ROWS)


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """The most blocks of `rows` that any ids of so many pairs fill: an expert with pairs has up to rows - 1 holes."""
    return min(pairs, (pairs + min(pairs, experts) * (rows - 1)) // rows)


def align(ids: Tensor, experts: int, rows: int) -> Alignment:
    """ids int64 [T, K] -> the alignment of its T · K pairs, numbered in order. There is at least one pair."""
    pairs, flat = ids.numel(), ids.reshape(-1).contiguous()
    blocks = most_blocks(pairs, experts, rows)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    places = torch.empty(blocks * rows, dtype=torch.int32, device=ids.device)
    block_expert = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    block = min(_BLOCK, max(16, triton.next_power_of_2(pairs)))
    count_kernel[(experts,)](flat, counts, pairs, BLOCK=block)
    place_kernel[(experts + 1,)](
        flat, counts, places, block_expert, pairs, experts, blocks, ROWS=rows,
        BLOCK_E=triton.next_power_of_2(experts), BLOCK=block,
    )  # fmt: skip
    return Alignment(places, block_expert, rows)


_IDS = {"ids": "i64", "counts": "i32"}


def _place_variant(experts: int, rows: int, block: int) -> Variant:
    types = pointers({**_IDS, "sorted_pairs": "i32", "block_expert": "i32"}, "pairs", "E", "blocks")
    return Variant(place_kernel, types, {"ROWS": rows, "BLOCK_E": triton.next_power_of_2(experts), "BLOCK": block})


VARIANTS = (
    Variant(count_kernel, pointers(_IDS, "pairs"), {"BLOCK": _BLOCK}),
    _place_variant(8, 16, 32),
    _place_variant(256, 128, _BLOCK),
)
