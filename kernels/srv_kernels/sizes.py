"""The sizes of a call, by which an implementation of an op is selected, from the call's arguments.

The functions take the arguments of the op and return the sizes in the order of `OpContract.sizes`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from srv_kernels.cases import GGUF_BLOCKS
from srv_kernels.expert_oracles import ACTIVATIONS, parts


def last_axis(x: Tensor, *others: Any) -> tuple[int, ...]:
    return (x.shape[-1],)


def half_of_last_axis(x: Tensor) -> tuple[int, ...]:
    return (x.shape[-1] // 2,)


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[int, ...]:
    return q.shape[-1], cos_sin.shape[-1]


def linear(x: Tensor, weight: Tensor, *others: Any) -> tuple[int, ...]:
    return x.shape[-1], len(weight)


def rows_gguf(rows: Tensor, quant_type: str, *others: Any) -> tuple[int, ...]:
    weights, size, _ = GGUF_BLOCKS[quant_type]
    return (rows.shape[-1] // size * weights,)


def causal_conv1d(x: Tensor, weight: Tensor, *others: Any) -> tuple[int, ...]:
    channels, width = weight.shape
    return channels, width


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[int, ...]:
    return q.shape[1], v.shape[1], q.shape[2], v.shape[2]


def state_space_scan(x: Tensor, b: Tensor, *others: Any) -> tuple[int, ...]:
    return x.shape[1], b.shape[1], x.shape[2], b.shape[2]


def selective_scan(x: Tensor, b: Tensor, *others: Any) -> tuple[int, ...]:
    return x.shape[1], b.shape[1]


def route_experts(logits: Tensor, bias: Tensor | None, top_k: int, *others: Any) -> tuple[int, ...]:
    return logits.shape[-1], top_k


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, *others: Any) -> tuple[int, ...]:
    """Of matrices of every storage: a row of them is an output, whatever its bytes."""
    activation = next(other for other in others if isinstance(other, str) and other in ACTIVATIONS)
    return x.shape[-1], gate_up.shape[1] // parts(activation), len(gate_up), ids.shape[1]
