"""The products of `moe_gemm` with FP8 weights (float8_e4m3fn) and the scales of their blocks; x is not quantized.

    gate_up    x [T, H], gate_up [E, 2 I, H] ── dot, dot ── · scales of blocks, sums ── activation · up ── [T · K, I]
    down       hidden [T · K, I], down [E, H, I] ── dot ── · scales of blocks, sums ── float32 [T · K, H]

Bytes are decoded as in `fp8_linear`, and a tile of inputs lies within one block, as there. The gate and the up
projection have blocks of their own: the first half of gate_up's scales is that of the gate.

Floor: for few tokens the weights of the experts that they choose, divided by the memory bandwidth; for many 6 T K H I
operations. To be confirmed on hardware: that decoding two tiles, and the scaling of each product, do not show beside
few rows.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.expert_oracles import parts
from srv_kernels.triton.fp8_linear import block_k, decoded
from srv_kernels.triton.moe_alignment import Alignment
from srv_kernels.triton.moe_gemm import activated, scaled, squared_relu
from srv_kernels.triton.numerics import dot, store
from srv_kernels.triton.quantized_tuning import MOE_GEMM, MOE_GEMM_FLOAT32, GemmBlocks, all_tiles, compiled_for
from srv_kernels.triton.variants import Variant, pointers


@triton.jit(do_not_specialize=["pairs"])
def moe_fp8_kernel(
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
    scale_rows,
    scale_columns,
    block_outputs,
    block_inputs,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """With an activation: gate and up, weight [E, 2 N, K]. With "" or "relu2": one product, weight [E, N, K].

    x: rows x_stride apart, each for top_k pairs; weight: the bytes of float8_e4m3fn; scale float32 [E, scale_rows,
    scale_columns], or twice as many rows, one per block_outputs x block_inputs; bias: [E, 2 N] or [E, N], or None; out
    [pairs, N]. BLOCK_K divides block_inputs, unless that is at least K.
    """
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    gated: tl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    pair = tl.load(sorted_pairs + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_output = (pair < pairs)[:, None], outputs < N
    x_rows = x + (pair // top_k).to(tl.int64)[:, None] * x_stride
    matrix = expert * (2 if gated else 1)  # the first of the expert's
    weight_rows = weight + (matrix * N + outputs)[:, None] * K
    scales = scale + (matrix * scale_rows + outputs // block_outputs) * scale_columns
    up_rows = weight + (matrix * N + N + outputs)[:, None] * K
    up_scales = scale + (matrix * scale_rows + scale_rows + outputs // block_outputs) * scale_columns
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = (start + tl.arange(0, BLOCK_K))[None, :]
        column = start // block_inputs
        mask = has_output[:, None] & (inputs < K)
        tile = tl.load(x_rows + inputs, mask=has_row & (inputs < K), other=0.0)
        product = _product(tile, weight_rows + inputs, mask)
        total += product * tl.load(scales + column, mask=has_output, other=0.0)[None, :]
        if gated:
            product = _product(tile, up_rows + inputs, mask)
            up += product * tl.load(up_scales + column, mask=has_output, other=0.0)[None, :]
    total = scaled(total, None, bias, matrix * N, outputs, has_output)
    if gated:
        total = activated(total, scaled(up, None, bias, matrix * N + N, outputs, has_output), ACTIVATION)
    elif ACTIVATION == "relu2":
        total = squared_relu(total)
    places = out + pair.to(tl.int64)[:, None] * N + outputs[None, :]
    store(places, total, mask=has_row & has_output[None, :])


@triton.jit
def _product(tile, places, mask):
    """tile [M, K] times the FP8 weights [N, K] at `places`, transposed -> float32 [M, N]."""
    weights = decoded(tl.load(places, mask=mask, other=0), tile.dtype)
    return dot(tile, tl.trans(weights), tl.zeros([tile.shape[0], weights.shape[0]], tl.float32))


def gate_up(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    scaled_blocks: tuple[int, int],
    alignment: Alignment,
    top_k: int,
    activation: str,
    blocks: GemmBlocks,
) -> Tensor:
    """x [T, H], weight float8_e4m3fn [E, 2 I, H], scale float32 [E, 2 R, C], bias [E, 2 I] of x's dtype or None ->
    [T · top_k, I] of x's dtype.

    `scaled_blocks`: the outputs and inputs that share a scale. Raises ValueError for scales of another shape.
    """
    out = x.new_empty(x.shape[0] * top_k, weight.shape[1] // parts(activation))
    return _multiply(x, weight, scale, bias, scaled_blocks, alignment, top_k, activation, blocks, out)


def down(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    scaled_blocks: tuple[int, int],
    alignment: Alignment,
    blocks: GemmBlocks,
) -> Tensor:
    """x [pairs, I], weight float8_e4m3fn [E, H, I], scale float32 [E, R, C], bias [E, H] or None -> float32 [pairs, H].

    Raises ValueError for another I, and for scales of another shape.
    """
    if x.shape[1] != weight.shape[2]:
        raise ValueError(f"gate_up has {x.shape[1]} outputs, but down has {weight.shape[2]} inputs")
    out = x.new_empty(x.shape[0], weight.shape[1], dtype=torch.float32)
    return _multiply(x, weight, scale, bias, scaled_blocks, alignment, 1, "", blocks, out)


def _multiply(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    scaled_blocks: tuple[int, int],
    alignment: Alignment,
    top_k: int,
    activation: str,
    blocks: GemmBlocks,
    out: Tensor,
) -> Tensor:
    outputs, inputs = out.shape[1], x.shape[1]
    rows, columns = (triton.cdiv(size, block) for size, block in zip((outputs, inputs), scaled_blocks, strict=True))
    needed = (weight.shape[0], rows * (parts(activation) if activation else 1), columns)
    if scale.shape != needed:
        raise ValueError(
            f"the scales of {'gate_up' if activation else 'down'} are {tuple(scale.shape)}, not {needed}, for blocks "
            f"of {scaled_blocks[0]} x {scaled_blocks[1]}"
        )
    weight, scale = weight.contiguous().view(torch.uint8), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    moe_fp8_kernel[(len(alignment.block_expert), triton.cdiv(outputs, blocks.block_n))](
        x, weight, scale, bias, alignment.sorted, alignment.block_expert, out, out.shape[0], top_k, outputs, inputs,
        x.stride(0), rows, columns, min(scaled_blocks[0], outputs), min(scaled_blocks[1], inputs),
        ACTIVATION=activation, BLOCK_M=alignment.rows, BLOCK_N=blocks.block_n,
        BLOCK_K=block_k(blocks.block_k, scaled_blocks[1], inputs), num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out


_SIZES = ("pairs", "top_k", "N", "K", "x_stride", "scale_rows", "scale_columns", "block_outputs", "block_inputs")
_ALIGNED = ("N", "K", "x_stride", "block_outputs", "block_inputs")


def _variants(dtype: str, activation: str, biased: bool = False) -> Iterator[Variant]:
    """The product with pointers of these types, for blocks of 128 x 128."""
    kinds = {"x": dtype, "weight": "u8", "scale": "fp32", "sorted_pairs": "i32", "block_expert": "i32"}
    kinds |= {"bias": dtype} if biased else {}
    kinds["out"] = dtype if activation else "fp32"
    for blocks, targets in compiled_for(MOE_GEMM_FLOAT32 if dtype == "fp32" else MOE_GEMM, all_tiles):
        sizes = {"BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n, "BLOCK_K": min(blocks.block_k, 128)}
        yield Variant(
            moe_fp8_kernel,
            pointers(kinds, *_SIZES),
            {"ACTIVATION": activation, **sizes} | ({} if biased else {"bias": None}),
            aligned=_ALIGNED,
            warps=blocks.warps,
            stages=blocks.stages,
            targets=targets,
        )


VARIANTS = (
    *(*_variants("bf16", "silu"), *_variants("bf16", "")),
    *(*_variants("fp16", "silu"), *_variants("fp16", "")),
    *(*_variants("fp32", "silu"), *_variants("fp32", "")),
    *(*_variants("bf16", "swiglu_clamped", biased=True), *_variants("bf16", "", biased=True)),
    *_variants("bf16", "relu2"),
)
