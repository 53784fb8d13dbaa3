"""The experts of a layer as operators: alignment, two grouped products with the activation between, and the reduction.

    x [T, H], ids int64 [T, K], weights float32 [T, K]
        align ── gate_up ── down ── reduce ── [T, H]

All launches depend on shapes alone, so that a step that calls them can be captured. Each operator is one for graphs and
simulated devices, and four or five launches.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
from torch import Tensor

from srv_kernels.triton import moe_fp8, moe_gguf
from srv_kernels.triton.moe_alignment import align
from srv_kernels.triton.moe_gemm import ACTIVATIONS, down, gate_up, reduce, tiles
from srv_kernels.triton.moe_routing import route_experts  # noqa: F401  registers its operator too
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.rows import matrix


def _like(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _check(x: Tensor, ids: Tensor, weights: Tensor, hidden: int, activation: str) -> None:
    """Raises ValueError for shapes that do not fit, and for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation}, not one of {', '.join(ACTIVATIONS)}")
    if x.shape[1] != hidden:
        raise ValueError(f"x has {x.shape[1]} columns, but the experts have {hidden} inputs")
    if ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"ids and weights are {tuple(ids.shape)} and {tuple(weights.shape)}, not both of {x.shape[0]} rows"
        )


def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: tuple[Tensor, Tensor | None, Tensor | None],
    second: tuple[Tensor, Tensor | None, Tensor | None],
    activation: str,
) -> Tensor:
    """first, second: weight, scale and bias of gate_up and of down."""
    _check(x, ids, weights, first[0].shape[2], activation)
    if ids.numel() == 0 or x.numel() == 0:
        return torch.zeros_like(x)
    ids, experts = ids.contiguous(), first[0].shape[0]
    x, blocks = matrix(x), tiles(x, ids.numel(), experts)
    alignment = align(ids, experts, blocks.block_m)
    first, second = (
        tuple(None if tensor is None else tensor.contiguous() for tensor in part) for part in (first, second)
    )
    hidden = gate_up(x, *first, alignment, ids.shape[1], activation, blocks)
    rows = down(hidden, *second, alignment, blocks)
    return reduce(rows, ids, weights.contiguous(), experts, x.dtype)


@triton_op(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
    "Tensor? down_bias, str activation) -> Tensor",
    like=_like,
)
def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """x [T, H], ids int64 and weights float32 [T, K], gate_up [E, 2 I, H], down [E, H, I], biases [E, 2 I] and
    [E, H] of x's dtype or None -> [T, H]. Ids outside [0, E) contribute nothing."""
    return _experts(x, ids, weights, (gate_up, None, gate_up_bias), (down, None, down_bias), activation)


@triton_op(
    "experts_int8(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
    "Tensor down_scale, str activation) -> Tensor",
    like=_like,
)
def experts_int8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    activation: str,
) -> Tensor:
    """As `experts`, with gate_up int8 [E, 2 I, H] and down int8 [E, H, I] and a float32 scale per output; x is not
    quantized."""
    return _experts(x, ids, weights, (gate_up, gate_up_scale, None), (down, down_scale, None), activation)


@triton_op(
    "experts_fp8(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
    "Tensor down_scale, int block_outputs, int block_inputs, str activation, Tensor? gate_up_bias=None, "
    "Tensor? down_bias=None) -> Tensor",
    like=_like,
)
def experts_fp8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    block_outputs: int,
    block_inputs: int,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """As `experts`, with gate_up float8_e4m3fn [E, 2 I, H] and down [E, H, I], and a float32 scale per block; x is not
    quantized."""
    _check(x, ids, weights, gate_up.shape[2], activation)
    if ids.numel() == 0 or x.numel() == 0:
        return torch.zeros_like(x)
    ids, count, scaled_blocks = ids.contiguous(), gate_up.shape[0], (block_outputs, block_inputs)
    x, blocks = matrix(x), tiles(x, ids.numel(), count)
    alignment = align(ids, count, blocks.block_m)
    first, second = (gate_up, gate_up_scale, gate_up_bias), (down, down_scale, down_bias)
    hidden = moe_fp8.gate_up(x, *first, scaled_blocks, alignment, ids.shape[1], activation, blocks)
    rows = moe_fp8.down(hidden, *second, scaled_blocks, alignment, blocks)
    return reduce(rows, ids, weights.contiguous(), count, x.dtype)


@triton_op(
    "experts_gguf(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, str gate_up_type, Tensor down, "
    "str down_type, str activation, Tensor? gate_up_bias=None, Tensor? down_bias=None) -> Tensor",
    like=_like,
)
def experts_gguf(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_type: str,
    down: Tensor,
    down_type: str,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """As `experts`, with rows of GGUF blocks: gate_up uint8 [E, 2 I, bytes] and down uint8 [E, H, bytes]."""
    _check(x, ids, weights, moe_gguf.inputs(gate_up, gate_up_type), activation)
    if ids.numel() == 0 or x.numel() == 0:
        return torch.zeros_like(x)
    ids, count = ids.contiguous(), gate_up.shape[0]
    x, blocks = matrix(x), moe_gguf.tiles(ids.numel(), count)
    alignment = align(ids, count, blocks.block_m)
    hidden = moe_gguf.gate_up(x, gate_up, gate_up_type, gate_up_bias, alignment, ids.shape[1], activation, blocks)
    rows = moe_gguf.down(hidden, down, down_type, down_bias, alignment, blocks)
    return reduce(rows, ids, weights.contiguous(), count, x.dtype)
