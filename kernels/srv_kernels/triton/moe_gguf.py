"""The products of `moe_gemm` with weights in GGUF blocks, which are dequantized in registers (see `gguf_blocks`).

Tiles of the weight are rounded to x's dtype; sums are float32. Floor: for few tokens the blocks of the experts that
they choose, divided by the memory bandwidth.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.expert_oracles import parts
from srv_kernels.triton.gguf_blocks import GROUP, LAYOUTS, BlockLayout, inputs_of, load_weights
from srv_kernels.triton.moe_alignment import Alignment
from srv_kernels.triton.moe_gemm import activated, scaled, squared_relu
from srv_kernels.triton.numerics import dot, round_to, store
from srv_kernels.triton.quantized_tuning import MOE_GGUF, GemmBlocks, all_tiles, compiled_for, for_rows
from srv_kernels.triton.variants import Variant, pointers


@triton.jit(do_not_specialize=["pairs"])
def moe_gguf_kernel(
    x,
    weight,
    bias,
    sorted_pairs,
    block_expert,
    out,
    pairs,
    top_k,
    N,
    groups,
    x_stride,
    weight_stride,
    ACTIVATION: tl.constexpr,
    TYPE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BYTES: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """With an activation: gate and up, weight [E, 2 N, bytes]. With "" or "relu2": one product, weight [E, N, bytes].

    x: rows x_stride apart, each for top_k pairs; bias: [E, 2 N] or [E, N], or None; out [pairs, N].
    """
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    gated: tl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    pair = tl.load(sorted_pairs + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + (pair // top_k).to(tl.int64)[:, None] * x_stride
    first = expert * (2 * N if gated else N)
    weight_rows = (weight + (first + outputs) * weight_stride)[:, None, None]
    up_rows = (weight + (first + N + outputs) * weight_stride)[:, None, None]
    place = tl.arange(0, BLOCK_G * 16)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, groups, BLOCK_G):
        group = (start + tl.arange(0, BLOCK_G))[None, :, None]
        mask = (outputs < N)[:, None, None] & (group < groups)
        flat = start + place // 16  # the groups again, once per position
        x_mask = (pair < pairs)[:, None] & (flat < groups)[None, :]
        for plane in tl.static_range(PLANES):
            inputs = inputs_of(flat, plane, TYPE, WEIGHTS, PLANES) + place % 16
            tile = tl.load(x_rows + inputs[None, :], mask=x_mask, other=0.0)
            weights = load_weights(weight_rows, group, mask, plane, TYPE, WEIGHTS, BYTES, PLANES)
            weights = round_to(tl.reshape(weights, [BLOCK_N, BLOCK_G * 16]), tile.dtype)
            total = dot(tile, tl.trans(weights), total)
            if gated:
                weights = load_weights(up_rows, group, mask, plane, TYPE, WEIGHTS, BYTES, PLANES)
                weights = round_to(tl.reshape(weights, [BLOCK_N, BLOCK_G * 16]), tile.dtype)
                up = dot(tile, tl.trans(weights), up)
    total = scaled(total, None, bias, first, outputs, outputs < N)
    if gated:
        total = activated(total, scaled(up, None, bias, first + N, outputs, outputs < N), ACTIVATION)
    elif ACTIVATION == "relu2":
        total = squared_relu(total)
    places = out + pair.to(tl.int64)[:, None] * N + outputs[None, :]
    store(places, total, mask=(pair < pairs)[:, None] & (outputs < N)[None, :])


def _layout(rows: Tensor, quant_type: str) -> BlockLayout:
    """Raises ValueError for types without a kernel, and for rows that are not whole blocks."""
    layout = LAYOUTS.get(quant_type)
    if layout is None:
        raise ValueError(f"there is no kernel for {quant_type}; there are kernels for {', '.join(LAYOUTS)}")
    if rows.shape[2] % layout.bytes:
        raise ValueError(f"rows of {rows.shape[2]} bytes are not whole blocks of {quant_type}, {layout.bytes} bytes")
    return layout


def inputs(rows: Tensor, quant_type: str) -> int:
    """Weights in each row of uint8 [E, N, bytes]. Raises ValueError as there is no kernel."""
    return _layout(rows, quant_type).inputs(rows.shape[2])


def tiles(pairs: int, experts: int) -> GemmBlocks:
    """See `moe_gemm.tiles`."""
    return for_rows(MOE_GGUF, triton.cdiv(pairs, experts))


def gate_up(
    x: Tensor,
    rows: Tensor,
    quant_type: str,
    bias: Tensor | None,
    alignment: Alignment,
    top_k: int,
    activation: str,
    blocks: GemmBlocks,
) -> Tensor:
    """x [T, H], rows uint8 [E, 2 I, bytes], bias [E, 2 I] or None -> [T · top_k, I] of x's dtype."""
    out = x.new_empty(x.shape[0] * top_k, rows.shape[1] // parts(activation))
    return _multiply(x, rows, quant_type, bias, alignment, top_k, activation, blocks, out)


def down(
    x: Tensor, rows: Tensor, quant_type: str, bias: Tensor | None, alignment: Alignment, blocks: GemmBlocks
) -> Tensor:
    """x [pairs, I], rows uint8 [E, H, bytes], bias [E, H] or None -> float32 [pairs, H].

    Raises ValueError for another I.
    """
    if x.shape[1] != inputs(rows, quant_type):
        raise ValueError(f"gate_up has {x.shape[1]} outputs, but down has {inputs(rows, quant_type)} inputs")
    out = x.new_empty(x.shape[0], rows.shape[1], dtype=torch.float32)
    return _multiply(x, rows, quant_type, bias, alignment, 1, "", blocks, out)


def _multiply(
    x: Tensor,
    rows: Tensor,
    quant_type: str,
    bias: Tensor | None,
    alignment: Alignment,
    top_k: int,
    activation: str,
    blocks: GemmBlocks,
    out: Tensor,
) -> Tensor:
    layout, rows = _layout(rows, quant_type), rows.contiguous()
    bias = None if bias is None else bias.contiguous()
    moe_gguf_kernel[(len(alignment.block_expert), triton.cdiv(out.shape[1], blocks.block_n))](
        x, rows, bias, alignment.sorted, alignment.block_expert, out, out.shape[0], top_k, out.shape[1],
        layout.groups(x.shape[1]), x.stride(0), rows.shape[2], ACTIVATION=activation, **_kind(quant_type, layout),
        BLOCK_M=alignment.rows, BLOCK_N=blocks.block_n, BLOCK_G=blocks.block_k // GROUP,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out


def _kind(quant_type: str, layout: BlockLayout) -> dict[str, str | int]:
    return {"TYPE": quant_type, "WEIGHTS": layout.weights, "BYTES": layout.bytes, "PLANES": layout.planes}


def _variants(quant_type: str, activation: str, dtype: str = "bf16", biased: bool = False) -> Iterator[Variant]:
    kinds = {"x": dtype, "weight": "u8", "sorted_pairs": "i32", "block_expert": "i32"}
    kinds |= {"bias": dtype} if biased else {}
    kinds["out"] = dtype if activation else "fp32"
    for blocks, targets in compiled_for(MOE_GGUF, all_tiles):
        sizes = {"BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n, "BLOCK_G": blocks.block_k // GROUP}
        yield Variant(
            moe_gguf_kernel,
            pointers(kinds, "pairs", "top_k", "N", "groups", "x_stride", "weight_stride"),
            {"ACTIVATION": activation, **_kind(quant_type, LAYOUTS[quant_type]), **sizes}
            | ({} if biased else {"bias": None}),
            aligned=("x_stride", "groups"),
            warps=blocks.warps,
            stages=blocks.stages,
            targets=targets,
        )


# As in common files: K-quants of 4 bits, of which some `down` have 6, Q8_0, and MXFP4 with biases.
VARIANTS = (
    *(*_variants("Q4_K", "silu"), *_variants("Q6_K", ""), *_variants("Q8_0", "silu")),
    *_variants("MXFP4", "swiglu_clamped", biased=True),
    *_variants("MXFP4", "", biased=True),
)
