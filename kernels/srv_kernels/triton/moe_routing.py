"""The choice of experts per token: scores, groups, top-k and weights, in one launch.

    logits float32 [T, E] ── scores ── + bias ── best groups ── top-k ── ids int64 [T, K], weights float32 [T, K]

A program has one token. Its tile is [groups, experts of a group], both padded to powers of two. Equal scores go to the
lower id. A token whose logits contain NaN gets the ids of the numbers, then the lowest others, so that ids are always
in range and distinct.

Floor: 4 E bytes per token, less than a thousandth of what its experts read; the launch itself is the time.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import store
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import matrix
from srv_kernels.triton.variants import Variant, pointers

SCORINGS = ("softmax", "sigmoid", "softmax_of_top_k")
MAX_EXPERTS = 4096  # that the tile of one token holds
_SMALLEST_SUM = tl.constexpr(1e-20)  # weights are divided by their sum, or by this if it is smaller
_LOWEST = tl.constexpr(float("-inf"))
_NONE = tl.constexpr(1 << 30)  # more than any index


@triton.jit
def _best(values, index, available):
    """(the largest available value of a tile [A, B], the lowest index that has it)."""
    shown = tl.where(available, values, _LOWEST)
    best = tl.max(tl.max(shown, axis=1), axis=0)
    return best, tl.min(tl.min(tl.where(available & (shown == best), index, _NONE), axis=1), axis=0)


@triton.jit
def route_kernel(
    logits,
    bias,
    ids,
    weights,
    E,
    logits_stride,
    group_size,
    scale,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """See the module; `bias` [E] may be None; E is GROUPS · group_size."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    place = tl.arange(0, BLOCK_S)[None, :]
    index = group * group_size + place
    exists = (group < GROUPS) & (place < group_size) & (index < E)
    scores = tl.load(logits + row * logits_stride + index, mask=exists, other=_LOWEST)
    if SCORING == "softmax":
        scores = tl.exp(scores - tl.max(tl.max(scores, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-tl.where(exists, scores, 0.0)))
    choice = scores
    if bias is not None:
        choice += tl.load(bias + index, mask=exists, other=0.0)
    choice = tl.where(choice == choice, choice, _LOWEST)
    available = exists
    if GROUPS > 1:
        shown = tl.where(available, choice, _LOWEST)
        ranks = tl.max(shown, axis=1)
        if bias is not None:  # the sum of the two best, which may be equal
            first = tl.min(tl.where(shown == ranks[:, None], index, _NONE), axis=1)
            second = tl.max(tl.where(index == first[:, None], _LOWEST, shown), axis=1)
            ranks += tl.where(group_size > 1, second, 0.0)
        chosen = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            left = (chosen == 0) & (tl.arange(0, BLOCK_G) < GROUPS)
            best = tl.max(tl.where(left, ranks, _LOWEST), axis=0)
            same = left & (tl.where(left, ranks, _LOWEST) == best)
            winner = tl.min(tl.where(same, tl.arange(0, BLOCK_G), _NONE), axis=0)
            chosen = tl.where(tl.arange(0, BLOCK_G) == winner, 1, chosen)
        available = available & (chosen > 0)[:, None]
    at = tl.arange(0, BLOCK_K)
    found = tl.zeros([BLOCK_K], tl.float32)
    kept = tl.full([BLOCK_K], 0, tl.int64)
    for rank in tl.static_range(TOP_K):
        _, winner = _best(choice, index, available)
        available = available & (index != winner)
        score = tl.sum(tl.sum(tl.where(index == winner, tl.where(exists, scores, 0.0), 0.0), axis=1), axis=0)
        found = tl.where(at == rank, score, found)
        kept = tl.where(at == rank, winner.to(tl.int64), kept)
    used = at < TOP_K
    if SCORING == "softmax_of_top_k":
        found = tl.where(used, tl.exp(found - tl.max(tl.where(used, found, _LOWEST), axis=0)), 0.0)
        found = found / tl.sum(found, axis=0)
    if RENORMALIZE:
        total = tl.sum(tl.where(used, found, 0.0), axis=0)
        found = found / tl.where(total < _SMALLEST_SUM, _SMALLEST_SUM, total)  # NaN stays NaN
    store(ids + row * TOP_K + at, kept, mask=used)
    store(weights + row * TOP_K + at, found * scale, mask=used)


def _like(logits: Tensor, bias: Tensor | None, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


def _refusal(experts: int, top_k: int, scoring: str, groups: int, top_groups: int) -> str | None:
    if scoring not in SCORINGS:
        return f"scoring is {scoring}, not one of {', '.join(SCORINGS)}"
    if experts > MAX_EXPERTS:
        return f"there are {experts} experts, more than the {MAX_EXPERTS} whose scores a program holds"
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        return f"{experts} experts in {groups} groups, of which the best {top_groups}, cannot be"
    available = experts // groups * top_groups
    return None if 1 <= top_k <= available else f"top_k is {top_k}, but {available} experts can be chosen"


@triton_op(
    "route_experts(Tensor logits, Tensor? bias, int top_k, str scoring, bool renormalize, int groups, int top_groups, "
    "float scale) -> (Tensor, Tensor)",
    like=_like,
)
def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """logits float32 [T, E], bias float32 [E] or None -> (ids int64 [T, top_k], weights float32 [T, top_k]).

    Raises ValueError for an unknown scoring, groups of unequal size, and more experts than can be chosen.
    """
    rows, experts = logits.shape
    if why := _refusal(experts, top_k, scoring, groups, top_groups):
        raise ValueError(why)
    ids, weights = _like(logits, bias, top_k)
    if rows == 0:
        return ids, weights
    logits = matrix(logits)
    size = experts // groups
    block_s = triton.next_power_of_2(size)
    block_g = triton.next_power_of_2(groups)
    route_kernel[(rows,)](
        logits, None if bias is None else bias.contiguous(), ids, weights, experts, logits.stride(0), size, scale,
        TOP_K=top_k, SCORING=scoring, RENORMALIZE=renormalize, GROUPS=groups, TOP_GROUPS=top_groups,
        BLOCK_K=triton.next_power_of_2(top_k), BLOCK_G=block_g, BLOCK_S=block_s,
        num_warps=_warps(block_g * block_s),
    )  # fmt: skip
    return ids, weights


def _warps(elements: int) -> int:
    return 1 if elements <= 256 else 4


def _variant(
    experts: int, top_k: int, scoring: str, groups: int = 1, top_groups: int = 1, bias: bool = False
) -> Variant:
    """As Qwen3-MoE (128 experts), gpt-oss (32) and DeepSeek-V3 (256 in 8 groups) route."""
    block_s, block_g = triton.next_power_of_2(experts // groups), triton.next_power_of_2(groups)
    kinds = {"logits": "fp32", **({"bias": "fp32"} if bias else {}), "ids": "i64", "weights": "fp32"}
    constants = {
        **({} if bias else {"bias": None}), "TOP_K": top_k, "SCORING": scoring, "RENORMALIZE": True, "GROUPS": groups,
        "TOP_GROUPS": top_groups, "BLOCK_K": triton.next_power_of_2(top_k), "BLOCK_G": block_g, "BLOCK_S": block_s,
    }  # fmt: skip
    types = pointers(kinds, "E", "logits_stride", "group_size") | {"scale": "fp32"}
    return Variant(route_kernel, types, constants, warps=_warps(block_g * block_s))


VARIANTS = (
    _variant(128, 8, "softmax"),
    _variant(32, 4, "softmax_of_top_k"),
    _variant(256, 8, "sigmoid", 8, 4, bias=True),
)
