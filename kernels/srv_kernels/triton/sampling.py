"""Sampling without sorting: the largest logit, and tokens drawn after top-k, top-p and min-p.

The tokens of a row have the order of the CPU's kernels: by descending logit, then by token id; without a filter, by
token id. Every filter keeps the first tokens of that order, so all that a filter contributes is the weight that it
keeps, and the least of these is the total that the random number is multiplied by.

    logits, descending   9.1   8.7   8.7   8.2   7.9   7.1 ...
    top-k 5              ├───────────────────────────┤
    top-p 0.9            ├─────────────────────┤                  the least weight is kept
    min-p 0.05           ├────────────────────────────────┤
    uniform · kept       ├─────────────┤ the token at whose end the cumulative weight is above

Three questions have one form: which is the largest logit such that the tokens of at least this logit reach a number,
or a weight? (top-k; top-p; the drawn token.) `_search` narrows it down between bounds on the bits of the logits, and
each pass over the row adds up what lies above a few pivots.

Weights are e^((logit - largest) / temperature) as integers, in units of 2⁻⁴⁴. Their sums are exact in any order, so
that a token does not depend on block sizes, on other rows, or on the device, except for the last bit of the device's
exponential. Tokens more than 30.5 temperatures below the largest logit have weight 0.

No result is read on the host, so the launches can be captured. Floor: `most_likely` reads the row once; a draw reads it
3 times without filters, and per filter, and for the draw, as often as `DrawBlocks` says, from L2 (a row of 128,256
tokens is 513 KB). To be confirmed on hardware: that one program per row is fast enough for a single row, where sorting
may win; sorting takes time in proportion to the rows.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import store, widen
from srv_kernels.triton.quantized_tuning import DRAW, MOST_LIKELY, of_target
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import matrix
from srv_kernels.triton.variants import FLOATS, Variant, pointers

MAX_VOCAB = (1 << 19) - 1  # the largest vocabulary whose weights have a sum below 2⁶³
_UNIT = tl.constexpr(float(1 << 44))  # the weight of the most likely token
_LOWEST_KEY = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def _largest(logits, rows, has_row, vocab, stride, BLOCK: tl.constexpr):
    """(largest logit float32, its first place int32, whether the row is valid), each [R].

    A row is valid if no logit is NaN or +inf, and one is above -inf.
    """
    sources = logits + rows.to(tl.int64)[:, None] * stride
    largest = tl.where(has_row, float("-inf"), float("-inf"))
    at = tl.zeros_like(rows)
    invalid = tl.zeros_like(rows)
    for start in range(0, vocab, BLOCK):
        ids = (start + tl.arange(0, BLOCK))[None, :]
        mask = has_row[:, None] & (ids < vocab)
        values = widen(tl.load(sources + ids, mask=mask, other=float("-inf")))
        invalid = tl.maximum(invalid, tl.max((values != values).to(tl.int32), axis=1))
        values = tl.where(values == values, values, float("-inf"))
        best = tl.max(values, axis=1)
        first = tl.min(tl.where(values == best[:, None], ids, vocab), axis=1)
        at = tl.where(best > largest, first, at)
        largest = tl.maximum(largest, best)
    valid = (invalid == 0) & (largest > float("-inf")) & (largest < float("inf"))
    return largest, at, valid


@triton.jit(do_not_specialize=["T"])
def most_likely_kernel(logits, tokens, valid, T, vocab, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit's first place, int64, and whether the row is valid, bool; 0 for a row that is not."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    has_row = rows < T
    _, at, is_valid = _largest(logits, rows, has_row, vocab, stride, BLOCK)
    store(tokens + rows, tl.where(is_valid, at, 0).to(tl.int64), mask=has_row)
    store(valid + rows, is_valid, mask=has_row)


@triton.jit
def _keys(values):
    """int64 keys in the order of float32 values; equal for 0 and -0. NaN is not ordered."""
    bits = tl.where(values == 0, 0, values.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _values(keys):
    bits = keys.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _shares(values, largest, temperature):
    """e^((value - largest) / temperature), float32."""
    return tl.exp((values - largest) / temperature)


@triton.jit
def _weights(values, largest, temperature):
    """The same as int64, in units of 2⁻⁴⁴."""
    return (_shares(values, largest, temperature) * _UNIT).to(tl.int64)


@triton.jit
def _load(sources, used, start, vocab, BLOCK: tl.constexpr):
    """float32 [R, BLOCK]: logits from token `start` on, -inf for tokens and rows that there are not."""
    ids = (start + tl.arange(0, BLOCK))[None, :]
    return widen(tl.load(sources + ids, mask=used[:, None] & (ids < vocab), other=float("-inf")))


@triton.jit
def _search(
    sources, used, largest, temperature, vocab, goal, COUNT: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """(key of a logit, measure of the tokens above it), int64 [R].

    The key is the largest for which the tokens of at least this logit reach the goal: their number (COUNT), or their
    weight. The goal [R] must not be above the measure of the whole row. A pass narrows the bounds, of which the lower
    reaches the goal and the upper does not, to a part in PIVOTS + 1.
    """
    low = tl.where(used, _LOWEST_KEY, _LOWEST_KEY).to(tl.int64)
    high = _keys(largest) + 1
    above = tl.zeros_like(low)
    step = tl.arange(0, PIVOTS)[None, :] + 1
    while tl.max(high - low, axis=0) > 1:
        pivots = low[:, None] + (high - low)[:, None] * step // (PIVOTS + 1)
        measure = tl.zeros_like(pivots)
        for start in range(0, vocab, BLOCK):
            values = _load(sources, used, start, vocab, BLOCK)
            keys = _keys(values)
            amounts = tl.full(keys.shape, 1, tl.int64)
            if not COUNT:
                amounts = _weights(values, largest[:, None], temperature[:, None])
            reached = keys[:, None, :] >= pivots[:, :, None]
            measure += tl.sum(tl.where(reached, amounts[:, None, :], 0), axis=2)
        enough = measure >= goal[:, None]
        low = tl.maximum(low, tl.max(tl.where(enough, pivots, low[:, None]), axis=1))
        high = tl.minimum(high, tl.min(tl.where(enough, high[:, None], pivots), axis=1))
        above = tl.maximum(above, tl.max(tl.where(enough, 0, measure), axis=1))
    return low, above


@triton.jit
def _sums(sources, used, largest, temperature, vocab, key, min_p, BLOCK: tl.constexpr):
    """int64 [R]: the weight of the row, of the tokens above a key, and of those of at least min_p."""
    total = tl.zeros_like(key)
    above = tl.zeros_like(key)
    heavy = tl.zeros_like(key)
    for start in range(0, vocab, BLOCK):
        values = _load(sources, used, start, vocab, BLOCK)
        weights = _weights(values, largest[:, None], temperature[:, None])
        is_heavy = _shares(values, largest[:, None], temperature[:, None]) >= min_p[:, None]
        total += tl.sum(weights, axis=1)
        above += tl.sum(tl.where(_keys(values) > key[:, None], weights, 0), axis=1)
        heavy += tl.sum(tl.where(is_heavy, weights, 0), axis=1)
    return total, above, heavy


@triton.jit
def _first_reaching(
    sources, used, largest, temperature, vocab, by_place, key, goal, BLOCK: tl.constexpr
):  # fmt: skip
    """int32 [R]: the first token in vocabulary order at which a sum reaches the goal.

    The sum is of weights; where `by_place`, of the tokens whose logit has the key.
    """
    token = tl.zeros_like(largest).to(tl.int32) + vocab
    before = tl.zeros_like(goal)
    for start in range(0, vocab, BLOCK):
        values = _load(sources, used, start, vocab, BLOCK)
        weights = _weights(values, largest[:, None], temperature[:, None])
        equal = (_keys(values) == key[:, None]).to(tl.int64)
        amounts = tl.where(by_place[:, None], equal, weights)
        reached = before[:, None] + tl.cumsum(amounts, axis=1) >= goal[:, None]
        ids = (start + tl.arange(0, BLOCK))[None, :]
        token = tl.minimum(token, tl.min(tl.where(reached, ids, vocab), axis=1))
        before += tl.sum(amounts, axis=1)
    return tl.minimum(token, vocab - 1)


@triton.jit(do_not_specialize=["T"])
def draw_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    tokens,
    T,
    vocab,
    stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """ROWS rows per program. Searches that no row of the program needs are left out."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    has_row = rows < T
    sources = logits + rows.to(tl.int64)[:, None] * stride
    largest, greedy, valid = _largest(logits, rows, has_row, vocab, stride, BLOCK)
    temperature = tl.load(temperatures + rows, mask=has_row, other=0.0)
    used = has_row & valid & (temperature > 0)
    token = tl.where(valid, greedy, 0)
    if tl.max(used.to(tl.int32), axis=0) > 0:
        largest = tl.where(used, largest, 0.0)
        temperature = tl.where(used, temperature, 1.0)
        top_k = tl.maximum(tl.load(top_ks + rows, mask=has_row, other=1), 1).to(tl.int64)
        top_p = tl.load(top_ps + rows, mask=has_row, other=1.0)
        min_p = tl.load(min_ps + rows, mask=has_row, other=0.0)
        has_top_k, has_top_p, has_min_p = used & (top_k < vocab), used & (top_p < 1), used & (min_p > 0)

        key = _keys(largest)
        count = tl.zeros_like(top_k)
        if tl.max(has_top_k.to(tl.int32), axis=0) > 0:
            goal = tl.where(has_top_k, top_k, 0)
            key, count = _search(sources, used, largest, temperature, vocab, goal, True, PIVOTS, BLOCK)
        total, above, heavy = _sums(sources, used, largest, temperature, vocab, key, min_p, BLOCK)
        ties = _weights(_values(key), largest, temperature)
        kept = tl.where(has_top_k, above + (top_k - count) * ties, total)

        if tl.max(has_top_p.to(tl.int32), axis=0) > 0:
            bound = tl.ceil(top_p.to(tl.float64) * kept.to(tl.float64)).to(tl.int64)
            goal = tl.where(has_top_p, tl.minimum(tl.maximum(bound, 1), kept), 0)
            key, above = _search(sources, used, largest, temperature, vocab, goal, False, PIVOTS, BLOCK)
            ties = tl.maximum(_weights(_values(key), largest, temperature), 1)
            nucleus = above + (goal - above + ties - 1) // ties * ties
            kept = tl.where(has_top_p, nucleus, kept)
        kept = tl.where(has_min_p, tl.minimum(kept, heavy), kept)
        kept = tl.maximum(kept, _weights(largest, largest, temperature))  # the first token is always kept

        uniform = tl.load(uniforms + rows, mask=has_row, other=0.0)
        goal = tl.minimum((uniform * kept.to(tl.float64)).to(tl.int64), kept - 1) + 1
        filtered = has_top_k | has_top_p | has_min_p
        if tl.max(filtered.to(tl.int32), axis=0) > 0:
            wanted = tl.where(filtered, goal, 0)
            key, above = _search(sources, used, largest, temperature, vocab, wanted, False, PIVOTS, BLOCK)
            ties = tl.maximum(_weights(_values(key), largest, temperature), 1)
            goal = tl.where(filtered, (goal - above + ties - 1) // ties, goal)
        drawn = _first_reaching(sources, used, largest, temperature, vocab, filtered, key, goal, BLOCK)
        token = tl.where(used, drawn, token)
    store(tokens + rows, token.to(tl.int64), mask=has_row)


def _tile(size: int, largest: int) -> int:
    """The power of two that covers `size`, or the largest that the table allows."""
    return min(triton.next_power_of_2(size), largest)


def _most_likely_like(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[0], dtype=torch.int64), logits.new_empty(logits.shape[0], dtype=torch.bool)


@triton_op("most_likely(Tensor logits) -> (Tensor, Tensor)", like=_most_likely_like)
def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, V] -> (int64 [T]: argmax, the first among equals; bool [T]: whether the logits are valid).

    Logits are not valid, and the argmax is 0, if one is NaN or +inf, or all are -inf.
    """
    tokens, valid = _most_likely_like(logits)
    if tokens.numel():
        logits = matrix(logits)
        (count, vocab), blocks = logits.shape, of_target(MOST_LIKELY)
        rows = _tile(count, blocks.rows)
        most_likely_kernel[(triton.cdiv(count, rows),)](
            logits, tokens, valid, count, vocab, logits.stride(0), ROWS=rows, BLOCK=_tile(vocab, blocks.block),
            num_warps=blocks.warps,
        )  # fmt: skip
    return tokens, valid


def _draw_like(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@triton_op(
    "draw(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor",
    like=_draw_like,
)
def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """logits [T, V] -> int64 [T]: tokens sampled as `srv.platform.interface.SamplingBackend` specifies.

    temperature, top_p, min_p: float32 [T]; top_k: int32 [T], at least 1; uniform: float64 [T] in [0, 1). Rows without
    valid logits (see `most_likely`) get token 0. Raises ValueError for a vocabulary above `MAX_VOCAB`.
    """
    count, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"the vocabulary has {vocab} tokens; the exact sums of weights are for {MAX_VOCAB} at most")
    tokens = _draw_like(logits)
    if count:
        logits = matrix(logits)
        columns = [column.contiguous() for column in (temperature, top_k, top_p, min_p, uniform)]
        blocks = of_target(DRAW)
        rows = _tile(count, blocks.rows)
        largest = min(blocks.block, tl.core.TRITON_MAX_TENSOR_NUMEL // (rows * blocks.pivots))  # a search compares all
        draw_kernel[(triton.cdiv(count, rows),)](
            logits, *columns, tokens, count, vocab, logits.stride(0), ROWS=rows,
            BLOCK=_tile(vocab, largest), PIVOTS=blocks.pivots, num_warps=blocks.warps,
        )  # fmt: skip
    return tokens


_BEST, _DRAW = MOST_LIKELY["gpu"], DRAW["gpu"]
_COLUMNS = {"temperatures": "fp32", "top_ks": "i32", "top_ps": "fp32", "min_ps": "fp32", "uniforms": "fp64"}
VARIANTS = (
    *(
        Variant(
            most_likely_kernel,
            pointers({"logits": kind, "tokens": "i64", "valid": "i1"}, "T", "vocab", "stride"),
            {"ROWS": _BEST.rows, "BLOCK": _BEST.block},
            aligned=("vocab", "stride"),
            warps=_BEST.warps,
        )
        for kind in FLOATS
    ),
    Variant(
        draw_kernel,
        pointers({"logits": "fp32", **_COLUMNS, "tokens": "i64"}, "T", "vocab", "stride"),
        {"ROWS": _DRAW.rows, "BLOCK": _DRAW.block, "PIVOTS": _DRAW.pivots},
        aligned=("vocab", "stride"),
        warps=_DRAW.warps,
    ),
)
