"""Linear layers with int8 weights: W8A8 with dynamic or static quantization of x, and weight-only int8.

    x [T, K] ── quantize (per row, or with the checkpoint's scale) ── int8 ──┐
    weight int8 [N, K] ──────────────────────────────────────────────────── dot ── int32 ── scales, bias ── [T, N]

The sums of int8 products are exact; weight-only int8 multiplies by the integers and accumulates in float32. A row's
result does not depend on the other rows, except that float32 sums round differently with other block sizes.

Floor: for few rows the N·K bytes of the weight divided by the memory bandwidth (4096 x 4096 at 3.35 TB/s: 5 µs); for
many rows 2·T·N·K operations divided by the int8 rate. Quantization reads x twice, the second time from cache, and
writes T·K bytes. To be confirmed on hardware: that few rows padded to one matrix instruction reach the floor.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import dot, round_to, store, widen
from srv_kernels.triton.quantized_tuning import (
    INT8_GEMM,
    INT8_GEMM_FLOAT32,
    QUANTIZE,
    GemmBlocks,
    all_tiles,
    compiled_for,
    for_rows,
    of_target,
)
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import matrix
from srv_kernels.triton.variants import FLOATS, Variant, pointers

_LARGEST = tl.constexpr(127.0)  # the largest magnitude of a quantized row


@triton.jit(do_not_specialize=["T"])
def quantize_rows_kernel(x, quantized, scales, T, K, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each row divided by its scale, largest magnitude / 127, and rounded to int8. With NaN or inf, that is NaN."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sources = x + rows.to(tl.int64)[:, None] * x_stride
    places = quantized + rows.to(tl.int64)[:, None] * K
    largest = tl.zeros([ROWS], tl.float32)
    invalid = tl.zeros([ROWS], tl.int32)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = (rows < T)[:, None] & (columns < K)[None, :]
        magnitudes = tl.abs(widen(tl.load(sources + columns[None, :], mask=mask, other=0.0)))
        largest = tl.maximum(largest, tl.max(magnitudes, axis=1))
        invalid = tl.maximum(invalid, tl.max((~(magnitudes < float("inf"))).to(tl.int32), axis=1))
    scale = tl.div_rn(tl.where(invalid > 0, 0.0, largest), _LARGEST)
    divisor = tl.where(scale == 0, 1.0, scale)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = (rows < T)[:, None] & (columns < K)[None, :]
        values = widen(tl.load(sources + columns[None, :], mask=mask & (invalid == 0)[:, None], other=0.0))
        ratio = tl.div_rn(values, tl.broadcast_to(divisor[:, None], [ROWS, BLOCK]))
        store(places + columns[None, :], round_to(ratio, tl.int8), mask=mask)
    store(scales + rows, tl.where(invalid > 0, float("nan"), scale), mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def quantize_static_kernel(
    x, quantized, input_scale, input_offset, T, K, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """x · (1 / input_scale) + input_offset, rounded to int8."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (columns < K)[None, :]
    values = widen(tl.load(x + rows.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=mask, other=0.0))
    shifted = values * tl.div_rn(1.0, tl.load(input_scale)) + tl.load(input_offset)
    places = quantized + rows.to(tl.int64)[:, None] * K + columns[None, :]
    store(places, round_to(shifted, tl.int8), mask=mask)


@triton.jit(do_not_specialize=["T"])
def int8_gemm_kernel(
    x,
    weight,
    row_scale,
    column_scale,
    int32_bias,
    bias,
    out,
    T,
    N,
    K,
    x_stride,
    weight_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(x weightᵀ + int32_bias) · row_scale · column_scale + bias; row_scale, int32_bias and bias may be None.

    x int8 or float [T, K]; weight int8 [N, K]; out [T, N]. The tiles of x that need the same weights run side by side.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_output = rows < T, outputs < N
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + outputs.to(tl.int64)[:, None] * weight_stride
    exact: tl.constexpr = x.dtype.element_ty == tl.int8
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if exact else tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        has_input = (inputs < K)[None, :]
        tile = tl.load(x_rows + inputs[None, :], mask=has_row[:, None] & has_input, other=0)
        weights = tl.load(weight_rows + inputs[None, :], mask=has_output[:, None] & has_input, other=0)
        if not exact:  # every int8 is exact in float16 and bfloat16
            weights = round_to(weights.to(tl.float32), tile.dtype)
        total = dot(tile, tl.trans(weights), total)
    if int32_bias is not None:
        total += tl.load(int32_bias + outputs, mask=has_output, other=0)[None, :]
    result = total.to(tl.float32)
    if row_scale is not None:
        result *= tl.load(row_scale + rows, mask=has_row, other=0.0)[:, None]
    result *= tl.load(column_scale + outputs, mask=has_output, other=0.0)[None, :]
    if bias is not None:
        result += widen(tl.load(bias + outputs, mask=has_output, other=0.0))[None, :]
    places = out + rows.to(tl.int64)[:, None] * N + outputs[None, :]
    store(places, result, mask=has_row[:, None] & has_output[None, :])


def multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    row_scale: Tensor | None,
    column_scale: Tensor,
    int32_bias: Tensor | None,
    bias: Tensor | None,
    blocks: GemmBlocks | None = None,
) -> Tensor:
    """Write the product of x [T, K] and weight [N, K] into `out` [T, N]; `blocks`: in place of the table's."""
    rows, outputs = out.shape
    blocks = blocks or for_rows(INT8_GEMM_FLOAT32 if x.dtype == torch.float32 else INT8_GEMM, rows)
    weight = matrix(weight)
    grid = (triton.cdiv(rows, blocks.block_m), triton.cdiv(outputs, blocks.block_n))
    int8_gemm_kernel[grid](
        x,
        weight,
        row_scale,
        column_scale.contiguous(),
        None if int32_bias is None else int32_bias.contiguous(),
        None if bias is None else bias.contiguous(),
        out,
        rows,
        outputs,
        weight.shape[1],
        x.stride(0),
        weight.stride(0),
        BLOCK_M=blocks.block_m,
        BLOCK_N=blocks.block_n,
        BLOCK_K=blocks.block_k,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out


def _like(x: Tensor, weight: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@triton_op("linear_w8a8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor", like=_like)
def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] or None -> [T, N].

    A row of x that contains NaN or inf has a result of NaN.
    """
    x, out = matrix(x), _like(x, weight)
    if out.numel() == 0:
        return out
    (rows, inputs), blocks = x.shape, of_target(QUANTIZE)
    quantized = torch.empty(rows, inputs, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    quantize_rows_kernel[(triton.cdiv(rows, blocks.rows),)](
        x, quantized, scales, rows, inputs, x.stride(0), ROWS=blocks.rows, BLOCK=blocks.block, num_warps=blocks.warps
    )
    return multiply(quantized, weight, out, scales, weight_scale, None, bias)


@triton_op(
    "linear_w8a8_static(Tensor x, Tensor weight, Tensor input_scale, Tensor input_offset, Tensor quant_bias, "
    "Tensor deq_scale) -> Tensor",
    like=_like,
)
def linear_w8a8_static(
    x: Tensor, weight: Tensor, input_scale: Tensor, input_offset: Tensor, quant_bias: Tensor, deq_scale: Tensor
) -> Tensor:
    """x [T, K], weight int8 [N, K], input_scale and input_offset float32 [1], quant_bias int32 [N],
    deq_scale float32 [N] -> [T, N].
    """
    x, out = matrix(x), _like(x, weight)
    if out.numel() == 0:
        return out
    (rows, inputs), blocks = x.shape, of_target(QUANTIZE)
    quantized = torch.empty(rows, inputs, dtype=torch.int8, device=x.device)
    quantize_static_kernel[(triton.cdiv(rows, blocks.rows), triton.cdiv(inputs, blocks.block))](
        x,
        quantized,
        input_scale,
        input_offset,
        rows,
        inputs,
        x.stride(0),
        ROWS=blocks.rows,
        BLOCK=blocks.block,
        num_warps=blocks.warps,
    )
    return multiply(quantized, weight, out, None, deq_scale, quant_bias, None)


@triton_op("linear_int8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor", like=_like)
def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] or None -> [T, N]; x is not quantized."""
    x, out = matrix(x), _like(x, weight)
    return multiply(x, weight, out, None, weight_scale, None, bias) if out.numel() else out


def _gemm_variants(table: Mapping[str, tuple[GemmBlocks, ...]], kinds: dict[str, str]) -> Iterator[Variant]:
    """The GEMM with pointers of these types; the other tensors are None."""
    absent = {name: None for name in ("row_scale", "int32_bias", "bias") if name not in kinds}
    for blocks, targets in compiled_for(table, all_tiles):
        yield Variant(
            int8_gemm_kernel,
            pointers(kinds, "T", "N", "K", "x_stride", "weight_stride"),
            {**absent, "BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n, "BLOCK_K": blocks.block_k},
            aligned=("N", "K", "x_stride", "weight_stride"),
            warps=blocks.warps,
            stages=blocks.stages,
            targets=targets,
        )


_ROWS = QUANTIZE["gpu"]
_WEIGHT = {"weight": "i8", "column_scale": "fp32"}
VARIANTS = (
    *(
        Variant(
            kernel,
            pointers({"x": kind, **others}, "T", "K", "x_stride"),
            {"ROWS": _ROWS.rows, "BLOCK": _ROWS.block},
            aligned=("K", "x_stride"),
            warps=_ROWS.warps,
        )
        for kernel, others in (
            (quantize_rows_kernel, {"quantized": "i8", "scales": "fp32"}),
            (quantize_static_kernel, {"quantized": "i8", "input_scale": "fp32", "input_offset": "fp32"}),
        )
        for kind in FLOATS
    ),
    *_gemm_variants(INT8_GEMM, {"x": "i8", **_WEIGHT, "row_scale": "fp32", "bias": "bf16", "out": "bf16"}),
    *_gemm_variants(INT8_GEMM, {"x": "i8", **_WEIGHT, "row_scale": "fp32", "out": "fp16"}),
    *_gemm_variants(INT8_GEMM, {"x": "i8", **_WEIGHT, "int32_bias": "i32", "out": "bf16"}),
    *_gemm_variants(INT8_GEMM, {"x": "bf16", **_WEIGHT, "out": "bf16"}),
    *_gemm_variants(INT8_GEMM, {"x": "fp16", **_WEIGHT, "bias": "fp16", "out": "fp16"}),
    *_gemm_variants(INT8_GEMM_FLOAT32, {"x": "fp32", **_WEIGHT, "out": "fp32"}),
)
