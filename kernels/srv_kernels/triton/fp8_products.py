"""Linear layers with FP8 weights whose inputs are quantized to FP8 as well (float8_e4m3fn), where there are many rows.

    x [T, K] ── quantize (per row, or per row and group of inputs) ── e4m3 ──┐
    weight e4m3 [N, K] ───────────────────────────────────────────────────── dot ── scales ── sum ── bias ── [T, N]

Scales are dynamic: the largest magnitude / 448. A row has one if outputs have one scale, and one per group of at most
128 inputs if blocks of the weight have scales. Each product of a tile is added to float32 sums by ordinary
instructions, because the matrix units of Hopper add e4m3 products with 14 bits only. Up to `EXACT_ROWS` rows, x is not
quantized, and the kernel is that of `fp8_linear`.

Floor: 2·T·N·K operations divided by the rate of e4m3, which is twice that of 16 bits (H100: 1979 against 989 TFLOPS).
Quantization reads x and writes T·K bytes. To be confirmed on hardware: that this is faster than decoding at all.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton import fp8_linear
from srv_kernels.triton.numerics import dot, store, widen
from srv_kernels.triton.quantized_tuning import FP8_GEMM, QUANTIZE, all_tiles, compiled_for, for_rows, of_target
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import matrix
from srv_kernels.triton.targets import FLOAT8_DOTS
from srv_kernels.triton.variants import Variant, pointers

# Reading the weights takes longer than 16-bit products of up to this many rows: the rate of products divided by twice
# the bandwidth is 58 (RTX 5090) to 209 (L40S) rows, and 148 on an H100.
EXACT_ROWS = 256
_LARGEST = tl.constexpr(448.0)  # the largest magnitude of a quantized group


@triton.jit(do_not_specialize=["T"])
def quantize_groups_kernel(x, quantized, scales, T, K, x_stride, group, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each group of a row divided by its scale, and rounded to e4m3. With NaN or inf, the scale is NaN.

    x float [T, K] -> quantized [T, K], scales float32 [ceil(K / group), T]. One program per group.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * group
    end = tl.minimum(begin + group, K)
    sources = x + rows.to(tl.int64)[:, None] * x_stride
    places = quantized + rows.to(tl.int64)[:, None] * K
    largest = tl.zeros([ROWS], tl.float32)
    invalid = tl.zeros([ROWS], tl.int32)
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = (rows < T)[:, None] & (columns < end)[None, :]
        magnitudes = tl.abs(widen(tl.load(sources + columns[None, :], mask=mask, other=0.0)))
        largest = tl.maximum(largest, tl.max(magnitudes, axis=1))
        invalid = tl.maximum(invalid, tl.max((~(magnitudes < float("inf"))).to(tl.int32), axis=1))
    scale = tl.div_rn(tl.where(invalid > 0, 0.0, largest), _LARGEST)
    divisor = tl.where(scale == 0, 1.0, scale)
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = (rows < T)[:, None] & (columns < end)[None, :]
        values = widen(tl.load(sources + columns[None, :], mask=mask & (invalid == 0)[:, None], other=0.0))
        ratio = tl.div_rn(values, tl.broadcast_to(divisor[:, None], [ROWS, BLOCK]))
        store(places + columns[None, :], ratio, mask=mask)
    places_of_scales = scales + tl.program_id(1).to(tl.int64) * T + rows
    store(places_of_scales, tl.where(invalid > 0, float("nan"), scale), mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def fp8_products_kernel(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    T,
    N,
    K,
    weight_stride,
    scale_stride,
    block_outputs,
    block_inputs,
    group,
    GROUPED: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(x · x_scale) (weight · scale)ᵀ + bias; bias may be None.

    x e4m3 [T, K]; x_scale float32 [ceil(K / group), T], or [1, T] unless GROUPED; weight e4m3 [N, K]; scale float32,
    one per block_outputs x block_inputs; out [T, N]. BLOCK_K divides block_inputs and group, unless these are at least
    K. ONE_SCALE: BLOCK_N divides block_outputs, so that a tile of the weight has one scale; read if GROUPED.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_output = rows < T, outputs < N
    x_rows = x + rows.to(tl.int64)[:, None] * K
    weight_rows = weight + outputs.to(tl.int64)[:, None] * weight_stride
    scale_rows = scale + (outputs // block_outputs).to(tl.int64) * scale_stride
    scale_row = scale + (tl.program_id(1) * BLOCK_N // block_outputs).to(tl.int64) * scale_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        has_input = (inputs < K)[None, :]
        tile = tl.load(x_rows + inputs[None, :], mask=has_row[:, None] & has_input, other=0.0)
        weights = tl.load(weight_rows + inputs[None, :], mask=has_output[:, None] & has_input, other=0.0)
        products = dot(tile, tl.trans(weights), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        if GROUPED:
            of_rows = tl.load(x_scale + (start // group).to(tl.int64) * T + rows, mask=has_row, other=0.0)
            if ONE_SCALE:
                factors = tl.load(scale_row + start // block_inputs)
            else:
                factors = tl.load(scale_rows + start // block_inputs, mask=has_output, other=0.0)[None, :]
            total += products * (of_rows[:, None] * factors)
        else:
            total += products
    if not GROUPED:
        total *= tl.load(x_scale + rows, mask=has_row, other=0.0)[:, None]
        total *= tl.load(scale_rows, mask=has_output, other=0.0)[None, :]
    if bias is not None:
        total += widen(tl.load(bias + outputs, mask=has_output, other=0.0))[None, :]
    places = out + rows.to(tl.int64)[:, None] * N + outputs[None, :]
    store(places, total, mask=has_row[:, None] & has_output[None, :])


def quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x float [T, K] -> float8_e4m3fn [T, K], and float32 scales [ceil(K / group), T] of groups of inputs."""
    (rows, inputs), sizes = x.shape, of_target(QUANTIZE)
    quantized = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(triton.cdiv(inputs, group), rows, dtype=torch.float32, device=x.device)
    block = min(sizes.block, triton.next_power_of_2(group))
    at_once = sizes.rows * sizes.block // block
    quantize_groups_kernel[(triton.cdiv(rows, at_once), scales.shape[0])](
        x, quantized, scales, rows, inputs, x.stride(0), group, ROWS=at_once, BLOCK=block, num_warps=sizes.warps
    )
    return quantized, scales


def _like(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@triton_op(
    "linear_fp8_quantized(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int block_outputs, int block_inputs)"
    " -> Tensor",
    like=_like,
)
def linear_fp8_quantized(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, block_outputs: int, block_inputs: int
) -> Tensor:
    """As `fp8_linear.linear_fp8`, but more than `EXACT_ROWS` rows of x are quantized to float8_e4m3fn.

    A row of x that contains NaN or inf has a result of NaN.
    """
    x = matrix(x)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    if rows <= EXACT_ROWS or not inputs or not outputs:
        return fp8_linear.linear_fp8(x, weight, scale, bias, block_outputs, block_inputs)
    blocks, out = for_rows(FP8_GEMM, rows), _like(x, weight)
    grouped, block_outputs = block_inputs < inputs, min(block_outputs, outputs)
    depth = fp8_linear.block_k(blocks.block_k, block_inputs, inputs)
    group = depth if grouped else inputs
    quantized, x_scale = quantize(x, group)
    weight, scale = matrix(weight), scale.contiguous()
    fp8_products_kernel[(triton.cdiv(rows, blocks.block_m), triton.cdiv(outputs, blocks.block_n))](
        quantized,
        x_scale,
        weight,
        scale,
        None if bias is None else bias.contiguous(),
        out,
        rows,
        outputs,
        inputs,
        weight.stride(0),
        scale.stride(0),
        block_outputs,
        min(block_inputs, inputs),
        group,
        GROUPED=grouped,
        ONE_SCALE=block_outputs == outputs or block_outputs % blocks.block_n == 0,
        BLOCK_M=blocks.block_m,
        BLOCK_N=blocks.block_n,
        BLOCK_K=depth,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out


def _variants() -> Iterator[Variant]:
    """Of targets that multiply e4m3: blocks of 128 x 128, and a scale per output."""
    sizes = QUANTIZE["gpu"]
    for kind, block in (("bf16", 128), ("fp16", 128), ("bf16", sizes.block)):
        yield Variant(
            quantize_groups_kernel,
            pointers({"x": kind, "quantized": "fp8e4nv", "scales": "fp32"}, "T", "K", "x_stride", "group"),
            {"ROWS": sizes.rows * sizes.block // block, "BLOCK": block},
            aligned=("K", "x_stride", "group"),
            warps=sizes.warps,
            targets=FLOAT8_DOTS,
        )
    operands = {"x": "fp8e4nv", "x_scale": "fp32", "weight": "fp8e4nv", "scale": "fp32"}
    for blocks, targets in compiled_for(FP8_GEMM, all_tiles):
        for more, of_blocks in (
            ({"out": "bf16"}, True),
            ({"out": "bf16"}, False),
            ({"bias": "fp16", "out": "fp16"}, False),
        ):
            names = ("T", "N", "K", "weight_stride", "scale_stride", "block_outputs", "block_inputs", "group")
            yield Variant(
                fp8_products_kernel,
                pointers({**operands, **more}, *names),
                {
                    **({} if "bias" in more else {"bias": None}),
                    **{"GROUPED": of_blocks, "ONE_SCALE": of_blocks},
                    **{"BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n, "BLOCK_K": blocks.block_k},
                },
                aligned=("N", "K", "weight_stride", "block_inputs", "group"),
                warps=blocks.warps,
                stages=blocks.stages,
                targets=FLOAT8_DOTS & (targets or FLOAT8_DOTS),
            )


VARIANTS = tuple(_variants())
