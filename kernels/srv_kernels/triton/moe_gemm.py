"""Products of tokens and the weights of their experts, in blocks of rows that share an expert (see `moe_alignment`).

    gate_up    x [T, H], gate_up [E, 2 I, H] ── dot, dot ── + bias ── activation · up ── hidden [T · K, I]
               without a gate: gate_up [E, I, H] ── dot ── + bias ── activation
    down       hidden [T · K, I], down [E, H, I] ── dot ── + bias ── float32 [T · K, H]
    reduce     the rows of a token, each times its weight, in the order of its experts ── [T, H]

Weights may be of x's dtype, or int8 with a scale per output; sums are float32. A row's sums have one order, whatever
the other rows are, unless another number of rows selects tiles of other depth.

Floor: for few tokens the weights of the experts that they choose, divided by the memory bandwidth; for many 6 T K H I
operations. To be confirmed on hardware: that the float32 rows of `down`, which are written and read once, cost less
than a tenth of the products for I of 768 and more.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.expert_oracles import parts
from srv_kernels.triton.moe_alignment import Alignment
from srv_kernels.triton.numerics import dot, round_to, store, widen
from srv_kernels.triton.quantized_tuning import (
    MOE_GEMM,
    MOE_GEMM_FLOAT32,
    GemmBlocks,
    all_tiles,
    compiled_for,
    for_rows,
)
from srv_kernels.triton.variants import Variant, pointers

ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_clamped", "silu_clamped", "relu2")
_LIMIT = tl.constexpr(7.0)  # of swiglu_clamped
_SILU_LIMIT = tl.constexpr(10.0)  # of silu_clamped
_REDUCED = 1024  # columns per program of the reduction


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """float32 gate and up -> act(gate) · up."""
    if ACTIVATION == "swiglu_clamped":  # comparisons, since NaN must stay NaN
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
        inner = 1.702 * gate
    elif ACTIVATION == "silu_clamped":
        gate = tl.where(gate > _SILU_LIMIT, _SILU_LIMIT, gate)
        up = tl.where(up > _SILU_LIMIT, _SILU_LIMIT, tl.where(up < -_SILU_LIMIT, -_SILU_LIMIT, up))
        inner = gate
    elif ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    else:
        tl.static_assert(ACTIVATION == "silu", "an activation without a kernel")
        inner = gate
    return gate / (1.0 + tl.exp(-inner)) * up


@triton.jit
def squared_relu(up):
    """float32 up -> the square of max(up, 0); NaN stays NaN."""
    up = tl.where(up < 0.0, 0.0, up)
    return up * up


@triton.jit
def as_float(weights, dtype: tl.constexpr):
    """A tile of the weight in x's dtype, in which every int8 is exact."""
    if weights.dtype == tl.int8:
        weights = round_to(weights.to(tl.float32), dtype)
    return weights


@triton.jit
def scaled(total, scale, bias, first, outputs, has_output):
    """total · scale + bias, both of one expert, beginning at `first`, or None."""
    if scale is not None:
        total *= tl.load(scale + first + outputs, mask=has_output, other=0.0)[None, :]
    if bias is not None:
        total += widen(tl.load(bias + first + outputs, mask=has_output, other=0.0))[None, :]
    return total


@triton.jit(do_not_specialize=["pairs"])
def gate_up_kernel(
    x,
    weight,
    scale,
    bias,
    sorted_pairs,
    block_expert,
    out,
    pairs,
    top_k,
    N,
    K,
    x_stride,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [pairs, N]; weight [E, 2 N, K]: gate, then up; or [E, N, K]: up alone, with the activation "relu2".

    The blocks of an expert run side by side.
    """
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    gated: tl.constexpr = ACTIVATION != "relu2"
    pair = tl.load(sorted_pairs + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_output = (pair < pairs)[:, None], (outputs < N)[:, None]
    x_rows = x + (pair // top_k).to(tl.int64)[:, None] * x_stride
    first = expert * (2 * N if gated else N)
    weight_rows = weight + (first + outputs)[:, None] * K
    up_rows = weight + (first + N + outputs)[:, None] * K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = (start + tl.arange(0, BLOCK_K))[None, :]
        tile = tl.load(x_rows + inputs, mask=has_row & (inputs < K), other=0.0)
        weights = tl.load(weight_rows + inputs, mask=has_output & (inputs < K), other=0)
        if gated:
            ups = tl.load(up_rows + inputs, mask=has_output & (inputs < K), other=0)
        total = dot(tile, tl.trans(as_float(weights, tile.dtype)), total)
        if gated:
            up = dot(tile, tl.trans(as_float(ups, tile.dtype)), up)
    total = scaled(total, scale, bias, first, outputs, outputs < N)
    if gated:
        total = activated(total, scaled(up, scale, bias, first + N, outputs, outputs < N), ACTIVATION)
    else:
        total = squared_relu(total)
    places = out + pair.to(tl.int64)[:, None] * N + outputs[None, :]
    store(places, total, mask=has_row & (outputs < N)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def down_kernel(
    x,
    weight,
    scale,
    bias,
    sorted_pairs,
    block_expert,
    out,
    pairs,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out float32 [pairs, N]; x [pairs, K]; weight [E, N, K]."""
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_output = (pair < pairs)[:, None], (outputs < N)[:, None]
    x_rows = x + pair.to(tl.int64)[:, None] * K
    weight_rows = weight + (expert * N + outputs)[:, None] * K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = (start + tl.arange(0, BLOCK_K))[None, :]
        tile = tl.load(x_rows + inputs, mask=has_row & (inputs < K), other=0.0)
        weights = tl.load(weight_rows + inputs, mask=has_output & (inputs < K), other=0)
        total = dot(tile, tl.trans(as_float(weights, tile.dtype)), total)
    total = scaled(total, scale, bias, expert * N, outputs, outputs < N)
    places = out + pair.to(tl.int64)[:, None] * N + outputs[None, :]
    store(places, total, mask=has_row & (outputs < N)[None, :])


@triton.jit
def reduce_kernel(rows, ids, weights, out, E, N, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, N]: the sum of a token's rows [T · K, N], each times its weight, in order; rows without an expert are
    unset."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        expert = tl.load(ids + pair)
        valid = (expert >= 0) & (expert < E)
        row = tl.load(rows + pair * N + columns, mask=columns < tl.where(valid, N, 0), other=0.0)
        total += tl.where(valid, tl.load(weights + pair), 0.0) * row
    store(out + token * N + columns, total, mask=columns < N)


def tiles(x: Tensor, pairs: int, experts: int) -> GemmBlocks:
    """The tiles for so many pairs of a token and an expert, from the mean of an expert's."""
    table = MOE_GEMM_FLOAT32 if x.dtype == torch.float32 else MOE_GEMM
    return for_rows(table, triton.cdiv(pairs, experts))


def gate_up(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    alignment: Alignment,
    top_k: int,
    activation: str,
    blocks: GemmBlocks,
) -> Tensor:
    """x [T, H], weight [E, 2 I, H], scale float32 and bias [E, 2 I] or None -> [T · top_k, I] of x's dtype.

    Without a gate, weight, scale and bias have I rows, here and for other storages.
    """
    pairs, outputs, inputs = x.shape[0] * top_k, weight.shape[1] // parts(activation), weight.shape[2]
    out = x.new_empty(pairs, outputs)
    gate_up_kernel[(len(alignment.block_expert), triton.cdiv(outputs, blocks.block_n))](
        x, weight, scale, bias, alignment.sorted, alignment.block_expert, out, pairs, top_k, outputs, inputs,
        x.stride(0), ACTIVATION=activation, BLOCK_M=alignment.rows, BLOCK_N=blocks.block_n, BLOCK_K=blocks.block_k,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out


def down(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, alignment: Alignment, blocks: GemmBlocks
) -> Tensor:
    """x [pairs, I], weight [E, H, I], scale float32 and bias [E, H] or None -> float32 [pairs, H]."""
    pairs, (_, outputs, inputs) = x.shape[0], weight.shape
    out = x.new_empty(pairs, outputs, dtype=torch.float32)
    down_kernel[(len(alignment.block_expert), triton.cdiv(outputs, blocks.block_n))](
        x, weight, scale, bias, alignment.sorted, alignment.block_expert, out, pairs, outputs, inputs,
        BLOCK_M=alignment.rows, BLOCK_N=blocks.block_n, BLOCK_K=blocks.block_k,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out


def reduce(rows: Tensor, ids: Tensor, weights: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """rows float32 [T · K, H], ids and weights [T, K] -> [T, H] of `dtype`."""
    (tokens, top_k), outputs = ids.shape, rows.shape[1]
    out = rows.new_empty(tokens, outputs, dtype=dtype)
    block = min(_REDUCED, triton.next_power_of_2(outputs))
    reduce_kernel[(tokens, triton.cdiv(outputs, block))](
        rows, ids, weights, out, experts, outputs, TOP_K=top_k, BLOCK=block
    )
    return out


_INDICES = {"sorted_pairs": "i32", "block_expert": "i32"}
_SIZES = ("pairs", "top_k", "N", "K", "x_stride")
Pick = Callable[[tuple[GemmBlocks, ...]], Sequence[GemmBlocks]]


def _first(entry: tuple[GemmBlocks, ...]) -> Sequence[GemmBlocks]:
    return all_tiles(entry[:1])


def _variants(
    dtype: str, pick: Pick, activation: str = "silu", weight: str = "", bias: bool = False
) -> Iterator[Variant]:
    """Both products; weights of another type than x's are int8 and have scales."""
    optional = {"scale": "fp32"} if weight else {}
    optional |= {"bias": dtype} if bias else {}
    absent = {name: None for name in ("scale", "bias") if name not in optional}
    kinds = {"x": dtype, "weight": weight or dtype, **optional, **_INDICES}
    for blocks, targets in compiled_for(MOE_GEMM_FLOAT32 if dtype == "fp32" else MOE_GEMM, pick):
        sizes = {"BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n, "BLOCK_K": blocks.block_k}
        launch = {"warps": blocks.warps, "stages": blocks.stages, "targets": targets}
        types = pointers({**kinds, "out": dtype}, *_SIZES)
        constants = {**absent, "ACTIVATION": activation, **sizes}
        yield Variant(gate_up_kernel, types, constants, aligned=("N", "K", "x_stride"), **launch)
        types = pointers({**kinds, "out": "fp32"}, "pairs", "N", "K")
        yield Variant(down_kernel, types, {**absent, **sizes}, aligned=("N", "K"), **launch)


def _reduce_variant(dtype: str, top_k: int) -> Variant:
    kinds = {"rows": "fp32", "ids": "i64", "weights": "fp32", "out": dtype}
    return Variant(reduce_kernel, pointers(kinds, "E", "N"), {"TOP_K": top_k, "BLOCK": _REDUCED}, aligned=("N",))


VARIANTS = (
    *_variants("bf16", all_tiles),
    *_variants("fp16", _first),
    *_variants("bf16", lambda entry: all_tiles((entry[0], entry[-1])), weight="i8"),
    *_variants("bf16", _first, "swiglu_clamped", bias=True),
    *_variants("fp32", _first, "gelu_tanh"),
    *(variant for variant in _variants("bf16", _first, "relu2") if variant.kernel is gate_up_kernel),
    _reduce_variant("bf16", 8),
    _reduce_variant("fp16", 2),
)
