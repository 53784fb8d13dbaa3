"""The product of rows and an unquantized weight with its float32 sums, for logits.

    x [T, K] ──┐
    weight ────┴── dot ── float32 [T, N]

It is for devices on which `torch.mm` returns 16-bit results only. Its rows are few: those whose logits are needed.

Floor: the N·K elements of the weight, 2 bytes each, divided by the memory bandwidth (128,256 x 4,096 at 3.35 TB/s:
0.31 ms); results are another 4 bytes for each of T·N. To be confirmed on hardware: that few rows padded to one matrix
instruction reach the floor.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import dot, store
from srv_kernels.triton.quantized_tuning import DENSE_GEMM, GemmBlocks, all_tiles, compiled_for, for_rows
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import matrix
from srv_kernels.triton.variants import FLOATS, Variant, pointers


@triton.jit(do_not_specialize=["T"])
def dense_gemm_kernel(
    x,
    weight,
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
    """x [T, K] times weight [N, K], of one dtype, into out float32 [T, N]. The tiles of x that need the same weights
    run side by side."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_output = (rows < T)[:, None], (outputs < N)[:, None]
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + outputs.to(tl.int64)[:, None] * weight_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = (start + tl.arange(0, BLOCK_K))[None, :]
        tile = tl.load(x_rows + inputs, mask=has_row & (inputs < K), other=0.0)
        weights = tl.load(weight_rows + inputs, mask=has_output & (inputs < K), other=0.0)
        total = dot(tile, tl.trans(weights), total)
    places = out + rows.to(tl.int64)[:, None] * N + outputs[None, :]
    store(places, total, mask=has_row & (outputs < N)[None, :])


def _like(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


@triton_op("linear_float32(Tensor x, Tensor weight) -> Tensor", like=_like)
def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] of x's dtype -> float32 [T, N]: the sums of the products, which are not rounded."""
    return multiply(x, weight)


def multiply(x: Tensor, weight: Tensor, blocks: GemmBlocks | None = None) -> Tensor:
    """As `linear_float32`; `blocks`: in place of the table's. Raises ValueError for other shapes or dtypes."""
    if x.dtype != weight.dtype or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {x.dtype} with {x.shape[1]} columns, but the weight is {weight.dtype} with {weight.shape[1]} inputs"
        )
    x, weight, out = matrix(x), matrix(weight), _like(x, weight)
    (rows, outputs), inputs = out.shape, weight.shape[1]
    if out.numel() == 0:
        return out
    blocks = blocks or for_rows(DENSE_GEMM, rows)
    dense_gemm_kernel[(triton.cdiv(rows, blocks.block_m), triton.cdiv(outputs, blocks.block_n))](
        x, weight, out, rows, outputs, inputs, x.stride(0), weight.stride(0),
        BLOCK_M=blocks.block_m, BLOCK_N=blocks.block_n, BLOCK_K=blocks.block_k,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out


def _variants(dtype: str) -> Iterator[Variant]:
    for blocks, targets in compiled_for(DENSE_GEMM, all_tiles):
        yield Variant(
            dense_gemm_kernel,
            pointers({"x": dtype, "weight": dtype, "out": "fp32"}, "T", "N", "K", "x_stride", "weight_stride"),
            {"BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n, "BLOCK_K": blocks.block_k},
            aligned=("N", "K", "x_stride", "weight_stride"),
            warps=blocks.warps,
            stages=blocks.stages,
            targets=targets,
        )


VARIANTS = tuple(variant for dtype in FLOATS for variant in _variants(dtype))
