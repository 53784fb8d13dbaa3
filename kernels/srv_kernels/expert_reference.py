"""Plain-torch implementations of the ops of mixtures of experts, for any device that torch supports.

Signatures are those of `srv_kernels.contracts`. Arguments are not modified. The number of tokens of each expert is read
on the host, so that each expert multiplies its own tokens only: on a device, every layer waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from srv_kernels import reference
from srv_kernels.expert_oracles import SMALLEST_SUM, parts

_LIMIT, _SLOPE = 7.0, 1.702  # of the activation of gpt-oss
_SILU_LIMIT = 10.0  # of "silu_clamped"


def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """logits float32 [T, E], bias float32 [E] or None -> (ids int64 [T, K], weights float32 [T, K]).

    Sorts, because `topk` may return equal scores in any order.
    """
    scores = logits
    if scoring != "softmax_of_top_k":
        scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.sort(dim=-1, descending=True).values[..., : 1 if bias is None else 2].sum(-1)
        order = best.sort(dim=-1, descending=True, stable=True).indices
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order[:, :top_groups], value=True)
        choice = grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = scores.gather(1, ids)
    if scoring == "softmax_of_top_k":
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(SMALLEST_SUM)
    return ids, weights * scale if scale != 1.0 else weights


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
    """x [T, H], ids int64 [T, K], weights float32 [T, K], gate_up [E, 2 I, H], down [E, H, I] -> [T, H].

    gate_up_bias [E, 2 I] or None, down_bias [E, H] or None. Without a gate, gate_up has I rows here and below.
    """

    def one(rows: Tensor, expert: int) -> Tensor:
        first = F.linear(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        return F.linear(activate(first, activation), down[expert], None if down_bias is None else down_bias[expert])

    return _by_expert(x, ids, weights, len(gate_up), one)


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
    """As `experts`, with int8 matrices and their scales, float32 [E, 2 I] and [E, H].

    Quantizes the rows of both products to int8, as `linear_w8a8` does.
    """

    def one(rows: Tensor, expert: int) -> Tensor:
        first = reference.linear_w8a8(rows, gate_up[expert], gate_up_scale[expert], None)
        return reference.linear_w8a8(activate(first, activation), down[expert], down_scale[expert], None)

    return _by_expert(x, ids, weights, len(gate_up), one)


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
    """As `experts`, with rows uint8 [E, 2 I, bytes per row] and [E, H, bytes per row] of a GGUF file.

    Slow, since every call dequantizes the experts that it uses.
    """

    def one(rows: Tensor, expert: int) -> Tensor:
        first = reference.linear_gguf(rows, gate_up[expert], gate_up_type)
        first = first if gate_up_bias is None else first + gate_up_bias[expert]
        second = reference.linear_gguf(activate(first, activation), down[expert], down_type)
        return second if down_bias is None else second + down_bias[expert]

    return _by_expert(x, ids, weights, len(gate_up), one)


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
    """As `experts`, with float8_e4m3fn matrices and the scales of their blocks: float32 [E, 2 R, C], of which the first
    R rows are those of the gate, and [E, R, C].
    """
    blocks, count = (block_outputs, block_inputs), parts(activation)

    def one(rows: Tensor, expert: int) -> Tensor:
        biases = [None] * count if gate_up_bias is None else gate_up_bias[expert].chunk(count)
        halves = zip(gate_up[expert].chunk(count), gate_up_scale[expert].chunk(count), biases, strict=True)
        first = torch.cat([reference.linear_fp8(rows, *part, *blocks) for part in halves], -1)
        bias = None if down_bias is None else down_bias[expert]
        return reference.linear_fp8(activate(first, activation), down[expert], down_scale[expert], bias, *blocks)

    return _by_expert(x, ids, weights, len(gate_up), one)


def _by_expert(x: Tensor, ids: Tensor, weights: Tensor, count: int, one: Callable[[Tensor, int], Tensor]) -> Tensor:
    """[T, H]: `one(rows, expert)` of each expert's tokens; then the weighted sum of each token's results, in order."""
    tokens, top_k = ids.shape
    is_local = (ids >= 0) & (ids < count)
    buckets = torch.where(is_local, ids, count).flatten()
    order = buckets.argsort(stable=True)
    rows = order // max(1, top_k)
    results = torch.zeros(tokens * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    begin = 0
    for expert, size in enumerate(torch.bincount(buckets, minlength=count + 1).tolist()[:count]):
        if size:
            part = slice(begin, begin + size)
            results[order[part]] = one(x.index_select(0, rows[part]), expert)
            begin += size
    parts = results.view(tokens, top_k, x.shape[1])
    out = torch.zeros(tokens, x.shape[1], dtype=torch.float32, device=x.device)
    for position in range(top_k):
        out = out + parts[:, position].float() * weights[:, position, None]
    return out.to(x.dtype)


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """The activation of experts, [N, 2 I] or [N, I] -> [N, I]; see `srv_kernels.expert_oracles.activated`."""
    if activation == "silu":
        return reference.silu_and_mul(gate_up)
    if activation == "gelu_tanh":
        return reference.gelu_tanh_and_mul(gate_up)
    if activation == "relu2":
        return F.relu(gate_up).square()
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu_clamped":
        gate, up = gate.clamp(max=_SILU_LIMIT), up.clamp(-_SILU_LIMIT, _SILU_LIMIT)
        return reference.silu_and_mul(torch.cat((gate, up), -1))
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return gate * (gate * _SLOPE).sigmoid() * (up + 1)
