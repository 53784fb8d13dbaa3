"""Linear layers with FP8 weights (float8_e4m3fn) and the scales of their blocks; x is not quantized.

    x [T, K] ──────────────────────────────────────────────── dot ── · scale of the block ── sum ── bias ── [T, N]
    weight uint8 [N, K] ── decoded to x's dtype, exactly ──────┘

Bytes are decoded by integer operations, because targets differ in the FP8 formats that they convert. A tile of inputs
lies within one block, so that its products have one scale per output. Sums are float32.

Floor: for few rows the N·K bytes of the weight divided by the memory bandwidth, as for int8; for many rows 2·T·N·K
operations divided by the rate of x's dtype. To be confirmed on hardware: that decoding does not show beside few rows.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import dot, round_to, store, widen
from srv_kernels.triton.quantized_tuning import (
    INT8_GEMM,
    INT8_GEMM_FLOAT32,
    GemmBlocks,
    all_tiles,
    compiled_for,
    for_rows,
)
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import matrix
from srv_kernels.triton.variants import Variant, pointers


@triton.jit
def decoded(codes, dtype: tl.constexpr):
    """The bytes of finite float8_e4m3fn numbers as `dtype`, in which each of them is exact."""
    codes = codes.to(tl.uint16)
    # The bits of the code at their places in a float16, whose exponent has 8 more bias.
    halves = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return round_to(halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0, dtype)


@triton.jit(do_not_specialize=["T"])
def fp8_gemm_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    T,
    N,
    K,
    x_stride,
    weight_stride,
    scale_stride,
    block_outputs,
    block_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x (weight · scale)ᵀ + bias; bias may be None.

    x float [T, K]; weight [N, K], the bytes of float8_e4m3fn; scale float32, one per block_outputs x block_inputs; out
    [T, N]. BLOCK_K divides block_inputs, unless that is at least K.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_output = rows < T, outputs < N
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + outputs.to(tl.int64)[:, None] * weight_stride
    scale_rows = scale + (outputs // block_outputs).to(tl.int64) * scale_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        has_input = (inputs < K)[None, :]
        tile = tl.load(x_rows + inputs[None, :], mask=has_row[:, None] & has_input, other=0.0)
        codes = tl.load(weight_rows + inputs[None, :], mask=has_output[:, None] & has_input, other=0)
        weights = decoded(codes, tile.dtype)
        scales = tl.load(scale_rows + start // block_inputs, mask=has_output, other=0.0)
        total += dot(tile, tl.trans(weights), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scales[None, :]
    if bias is not None:
        total += widen(tl.load(bias + outputs, mask=has_output, other=0.0))[None, :]
    places = out + rows.to(tl.int64)[:, None] * N + outputs[None, :]
    store(places, total, mask=has_row[:, None] & has_output[None, :])


def block_k(most: int, block_inputs: int, inputs: int) -> int:
    """The inputs of a tile, at most `most`, none of which has inputs of two blocks."""
    return most if block_inputs >= inputs else math.gcd(most, block_inputs)


def _like(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@triton_op(
    "linear_fp8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int block_outputs, int block_inputs) -> Tensor",
    like=_like,
)
def linear_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, block_outputs: int, block_inputs: int
) -> Tensor:
    """x [T, K], weight float8_e4m3fn [N, K], scale float32 [ceil(N / block_outputs), ceil(K / block_inputs)], bias [N]
    or None -> [T, N]; x is not quantized.
    """
    x, out = matrix(x), _like(x, weight)
    if out.numel() == 0:
        return out
    (rows, inputs), outputs = x.shape, weight.shape[0]
    blocks = for_rows(INT8_GEMM_FLOAT32 if x.dtype == torch.float32 else INT8_GEMM, rows)  # as many bytes and sums
    weight, scale = matrix(weight.view(torch.uint8)), scale.contiguous()
    grid = (triton.cdiv(rows, blocks.block_m), triton.cdiv(outputs, blocks.block_n))
    fp8_gemm_kernel[grid](
        x,
        weight,
        scale,
        None if bias is None else bias.contiguous(),
        out,
        rows,
        outputs,
        inputs,
        x.stride(0),
        weight.stride(0),
        scale.stride(0),
        min(block_outputs, outputs),
        min(block_inputs, inputs),
        BLOCK_M=blocks.block_m,
        BLOCK_N=blocks.block_n,
        BLOCK_K=block_k(blocks.block_k, block_inputs, inputs),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out


def _variants(table: Mapping[str, tuple[GemmBlocks, ...]], kinds: dict[str, str]) -> Iterator[Variant]:
    """The GEMM with pointers of these types, for blocks of 128 x 128."""
    sizes = ("T", "N", "K", "x_stride", "weight_stride", "scale_stride", "block_outputs", "block_inputs")
    for blocks, targets in compiled_for(table, all_tiles):
        yield Variant(
            fp8_gemm_kernel,
            pointers({**kinds, "weight": "u8", "scale": "fp32"}, *sizes),
            {
                **({} if "bias" in kinds else {"bias": None}),
                **{"BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n, "BLOCK_K": min(blocks.block_k, 128)},
            },
            aligned=("N", "K", "x_stride", "weight_stride", "block_outputs", "block_inputs"),
            warps=blocks.warps,
            stages=blocks.stages,
            targets=targets,
        )


VARIANTS = (
    *_variants(INT8_GEMM, {"x": "bf16", "out": "bf16"}),
    *_variants(INT8_GEMM, {"x": "fp16", "bias": "fp16", "out": "fp16"}),
    *_variants(INT8_GEMM_FLOAT32, {"x": "fp32", "out": "fp32"}),
)
