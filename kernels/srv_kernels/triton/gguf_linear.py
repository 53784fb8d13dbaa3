"""Linear layers and the embedding lookup on GGUF blocks as they are stored: weights are dequantized in registers.

    up to 8 rows    GEMV: products in float32, x in its own dtype, no matrix instruction
    more rows       GEMM: dequantized tiles are rounded to x's dtype and multiplied, sums in float32

Floor: for few rows the bytes of the blocks divided by the memory bandwidth (Q4_K, 4.5 bits per weight: 4096 x 4096 at
3.35 TB/s takes 2.8 µs). A GEMM dequantizes a tile once per block of rows, so that it is bound by that arithmetic, about
eight instructions per weight, and not by the matrix units. To be confirmed on hardware: the number of rows at which the
GEMM overtakes the GEMV, and whether blocks of 18, 34 and 210 bytes, which are loaded 2 bytes at a time, reach half of
the bandwidth.

Up to 8 rows, a row's result does not depend on the others: its sum has one order for every number of rows.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.gguf_blocks import GROUP, LAYOUTS, BlockLayout, inputs_of, load_weights
from srv_kernels.triton.numerics import dot, round_to, store, widen
from srv_kernels.triton.quantized_tuning import (
    GEMV_ROWS,
    GGUF_GEMM,
    GGUF_GEMV,
    GGUF_ROWS,
    GemmBlocks,
    GemvBlocks,
    all_tiles,
    compiled_for,
    for_rows,
    gemv_rows,
    of_target,
)
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import matrix
from srv_kernels.triton.variants import Variant, pointers


@triton.jit(do_not_specialize=["T"])
def gguf_gemv_kernel(
    x,
    weight,
    out,
    T,
    N,
    groups,
    x_stride,
    weight_stride,
    TYPE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BYTES: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """x [T, K] with T <= ROWS; weight: rows of blocks, weight_stride bytes apart; out [T, N]; groups: per row."""
    rows = tl.arange(0, ROWS)[:, None, None, None]
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = (weight + outputs.to(tl.int64) * weight_stride)[:, None, None]
    at = tl.arange(0, 16)[None, None, None, :]
    total = tl.zeros([ROWS, BLOCK_N, BLOCK_G, 16], tl.float32)
    for start in range(0, groups, BLOCK_G):
        group = (start + tl.arange(0, BLOCK_G))[None, :, None]
        mask = (outputs < N)[:, None, None] & (group < groups)
        for plane in tl.static_range(PLANES):
            weights = load_weights(weight_rows, group, mask, plane, TYPE, WEIGHTS, BYTES, PLANES)
            inputs = inputs_of(group, plane, TYPE, WEIGHTS, PLANES)[None, :, :, :] + at
            x_mask = (rows < T) & (group < groups)[None, :, :, :]
            total += weights[None, :, :, :] * widen(tl.load(x + rows * x_stride + inputs, mask=x_mask, other=0.0))
    result = tl.sum(tl.sum(total, axis=3), axis=2)
    row = tl.arange(0, ROWS)[:, None]
    store(out + row.to(tl.int64) * N + outputs[None, :], result, mask=(row < T) & (outputs < N)[None, :])


@triton.jit(do_not_specialize=["T"])
def gguf_gemm_kernel(
    x,
    weight,
    out,
    T,
    N,
    groups,
    x_stride,
    weight_stride,
    TYPE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BYTES: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """As the GEMV, for any T. The tiles of x that need the same weights run side by side."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = (weight + outputs.to(tl.int64) * weight_stride)[:, None, None]
    place = tl.arange(0, BLOCK_G * 16)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, groups, BLOCK_G):
        group = (start + tl.arange(0, BLOCK_G))[None, :, None]
        mask = (outputs < N)[:, None, None] & (group < groups)
        flat = start + place // 16  # the groups again, once per position
        x_mask = (rows < T)[:, None] & (flat < groups)[None, :]
        for plane in tl.static_range(PLANES):
            weights = load_weights(weight_rows, group, mask, plane, TYPE, WEIGHTS, BYTES, PLANES)
            inputs = inputs_of(flat, plane, TYPE, WEIGHTS, PLANES) + place % 16
            tile = tl.load(x_rows + inputs[None, :], mask=x_mask, other=0.0)
            weights = round_to(tl.reshape(weights, [BLOCK_N, BLOCK_G * 16]), tile.dtype)
            total = dot(tile, tl.trans(weights), total)
    places = out + rows.to(tl.int64)[:, None] * N + outputs[None, :]
    store(places, total, mask=(rows < T)[:, None] & (outputs < N)[None, :])


@triton.jit(do_not_specialize=["T"])
def gguf_rows_kernel(
    weight,
    indices,
    out,
    T,
    groups,
    inputs,
    weight_stride,
    TYPE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BYTES: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """out [T, inputs]: the rows of `weight` at `indices`, dequantized. A program has ROWS rows and BLOCK_G groups."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = tl.load(indices + rows, mask=rows < T, other=0).to(tl.int64)
    sources = (weight + index * weight_stride)[:, None, None]
    group = (tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G))[None, :, None]
    mask = (rows < T)[:, None, None] & (group < groups)
    for plane in tl.static_range(PLANES):
        weights = load_weights(sources, group, mask, plane, TYPE, WEIGHTS, BYTES, PLANES)
        places = inputs_of(group, plane, TYPE, WEIGHTS, PLANES) + tl.arange(0, 16)[None, None, :]
        store(out + rows.to(tl.int64)[:, None, None] * inputs + places, weights, mask=mask)


def _layout(rows: Tensor, quant_type: str) -> BlockLayout:
    """Raises ValueError for types without a kernel, and for rows that are not whole blocks."""
    layout = LAYOUTS.get(quant_type)
    if layout is None:
        raise ValueError(f"there is no kernel for {quant_type}; there are kernels for {', '.join(LAYOUTS)}")
    if rows.shape[1] % layout.bytes:
        raise ValueError(f"rows of {rows.shape[1]} bytes are not whole blocks of {quant_type}, {layout.bytes} bytes")
    return layout


def _kind(quant_type: str, layout: BlockLayout) -> dict[str, Any]:
    """The constants of a kernel for a type."""
    return {"TYPE": quant_type, "WEIGHTS": layout.weights, "BYTES": layout.bytes, "PLANES": layout.planes}


def _linear_like(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    return x.new_empty(x.shape[0], rows.shape[0])


@triton_op("linear_gguf(Tensor x, Tensor rows, str quant_type) -> Tensor", like=_linear_like)
def linear_gguf(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """x [T, K], rows uint8 [N, bytes per row] of a GGUF file -> [T, N]; x is not quantized."""
    out = _linear_like(x, rows, quant_type)
    return _multiply_into(out, x, rows, quant_type)


def _float32_like(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    return x.new_empty(x.shape[0], rows.shape[0], dtype=torch.float32)


@triton_op("linear_gguf_float32(Tensor x, Tensor rows, str quant_type) -> Tensor", like=_float32_like)
def linear_gguf_float32(x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    """As `linear_gguf` -> float32 [T, N]: the sums, before they are rounded to x's dtype."""
    return _multiply_into(_float32_like(x, rows, quant_type), x, rows, quant_type)


def _multiply_into(out: Tensor, x: Tensor, rows: Tensor, quant_type: str) -> Tensor:
    inputs = _layout(rows, quant_type).inputs(rows.shape[1])
    if x.shape[1] != inputs:
        raise ValueError(f"x has {x.shape[1]} columns, but the weight has {inputs} inputs")
    if out.numel() == 0:
        return out
    count = out.shape[0]
    few = gemv_rows(count) is not None
    return multiply(x, rows, quant_type, of_target(GGUF_GEMV) if few else for_rows(GGUF_GEMM, count), out)


def multiply(
    x: Tensor, rows: Tensor, quant_type: str, blocks: GemvBlocks | GemmBlocks, out: Tensor | None = None
) -> Tensor:
    """As `linear_gguf`, with these sizes; those of the GEMV are for up to `GEMV_ROWS[-1]` rows of x.

    out: receives the result, of x's dtype or float32.
    """
    layout, out = _layout(rows, quant_type), _linear_like(x, rows, quant_type) if out is None else out
    x, rows = matrix(x), matrix(rows)
    count, outputs = out.shape
    sizes = (count, outputs, layout.groups(x.shape[1]), x.stride(0), rows.stride(0))
    kind = _kind(quant_type, layout)
    if isinstance(blocks, GemvBlocks):
        padded = gemv_rows(count)
        block_n = max(1, blocks.results // padded)
        gguf_gemv_kernel[(triton.cdiv(outputs, block_n),)](
            x, rows, out, *sizes, **kind, ROWS=padded, BLOCK_N=block_n, BLOCK_G=blocks.block_positions // GROUP,
            num_warps=blocks.warps,
        )  # fmt: skip
        return out
    gguf_gemm_kernel[(triton.cdiv(count, blocks.block_m), triton.cdiv(outputs, blocks.block_n))](
        x, rows, out, *sizes, **kind, BLOCK_M=blocks.block_m, BLOCK_N=blocks.block_n, BLOCK_G=blocks.block_k // GROUP,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out


def _rows_like(rows: Tensor, quant_type: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
    inputs = _layout(rows, quant_type).inputs(rows.shape[1])
    return rows.new_empty(indices.shape[0], inputs, dtype=dtype)


@triton_op("rows_gguf(Tensor rows, str quant_type, Tensor indices, ScalarType dtype) -> Tensor", like=_rows_like)
def rows_gguf(rows: Tensor, quant_type: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """rows uint8 [N, bytes per row], indices int64 [T], each below N (not checked) -> [T, K] of `dtype`."""
    layout, out = _layout(rows, quant_type), _rows_like(rows, quant_type, indices, dtype)
    if out.numel() == 0:
        return out
    rows, blocks = matrix(rows), of_target(GGUF_ROWS)
    groups, block_g = layout.groups(out.shape[1]), blocks.block // GROUP
    gguf_rows_kernel[(triton.cdiv(out.shape[0], blocks.rows), triton.cdiv(groups, block_g))](
        rows, indices.contiguous(), out, out.shape[0], groups, out.shape[1], rows.stride(0),
        **_kind(quant_type, layout), ROWS=blocks.rows, BLOCK_G=block_g, num_warps=blocks.warps,
    )  # fmt: skip
    return out


_SIZES = ("T", "N", "groups", "x_stride", "weight_stride")
_ROWS = GGUF_ROWS["gpu"]
_WIDELY = "Q4_K"  # the type that is compiled for every size and dtype
_LOGITS = "Q6_K"  # the usual type of the output layer, whose results are float32


def _gemv_variants(quant_type: str, rows: int, dtype: str = "bf16", out: str = "") -> Iterator[Variant]:
    for blocks, targets in compiled_for(GGUF_GEMV, lambda entry: [entry]):
        yield Variant(
            gguf_gemv_kernel,
            pointers({"x": dtype, "weight": "u8", "out": out or dtype}, *_SIZES),
            {
                **_kind(quant_type, LAYOUTS[quant_type]),
                "ROWS": rows,
                "BLOCK_N": max(1, blocks.results // rows),
                "BLOCK_G": blocks.block_positions // GROUP,
            },
            aligned=("x_stride", "groups"),
            warps=blocks.warps,
            targets=targets,
        )


def _gemm_variants(
    quant_type: str,
    pick: Callable[[tuple[GemmBlocks, ...]], Sequence[GemmBlocks]],
    dtype: str = "bf16",
    out: str = "",
) -> Iterator[Variant]:
    for blocks, targets in compiled_for(GGUF_GEMM, pick):
        yield Variant(
            gguf_gemm_kernel,
            pointers({"x": dtype, "weight": "u8", "out": out or dtype}, *_SIZES),
            {
                **_kind(quant_type, LAYOUTS[quant_type]),
                "BLOCK_M": blocks.block_m,
                "BLOCK_N": blocks.block_n,
                "BLOCK_G": blocks.block_k // GROUP,
            },
            aligned=("x_stride", "groups"),
            warps=blocks.warps,
            stages=blocks.stages,
            targets=targets,
        )


def _rows_variant(quant_type: str, dtype: str = "bf16") -> Variant:
    return Variant(
        gguf_rows_kernel,
        pointers({"weight": "u8", "indices": "i64", "out": dtype}, "T", "groups", "inputs", "weight_stride"),
        {**_kind(quant_type, LAYOUTS[quant_type]), "ROWS": _ROWS.rows, "BLOCK_G": _ROWS.block // GROUP},
        aligned=("groups", "inputs"),
        warps=_ROWS.warps,
    )


VARIANTS = (
    *(variant for quant_type in LAYOUTS for variant in _gemv_variants(quant_type, 1)),
    *(variant for rows in GEMV_ROWS[1:] for variant in _gemv_variants(_WIDELY, rows)),
    *(variant for dtype in ("fp32", "fp16") for variant in _gemv_variants(_WIDELY, 1, dtype)),
    *(
        variant
        for quant_type in LAYOUTS
        for variant in _gemm_variants(
            quant_type, all_tiles if quant_type == _WIDELY else lambda entry: all_tiles(entry[-1:])
        )
    ),
    *(
        variant
        for dtype in ("fp32", "fp16")
        for variant in _gemm_variants(_WIDELY, lambda entry: all_tiles(entry[:1]), dtype)
    ),
    *_gemv_variants(_LOGITS, 1, out="fp32"),
    *_gemm_variants(_LOGITS, lambda entry: all_tiles(entry[:1]), out="fp32"),
    *(_rows_variant(quant_type) for quant_type in LAYOUTS),
    *(_rows_variant(_WIDELY, dtype) for dtype in ("fp32", "fp16")),
)
