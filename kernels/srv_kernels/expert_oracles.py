"""The mathematics of the ops of mixtures of experts in float64; as `oracles` has it for the other ops.

E experts, of which each of T tokens uses K; hidden size H, intermediate size I of one expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv_kernels.oracles import dequantize_fp8, dequantize_rows, float64, gelu_tanh_and_mul, silu_and_mul

ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_clamped", "silu_clamped", "relu2")
UNGATED = ("relu2",)  # of `up` alone
SMALLEST_SUM = 1e-20  # weights are divided by their sum, or by this if it is smaller


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
    """The K experts of each token and their weights, in the order of descending choice scores.

    logits float32 [T, E], bias float32 [E] or None -> (ids int64 [T, K], weights [T, K]). The scores of a token are the
    softmax of its logits (Shazeer et al. 2017, arXiv:1701.06538), their sigmoid (DeepSeek-V3, arXiv:2412.19437), or the
    softmax of the chosen logits only ("softmax_of_top_k", which chooses by the logits). The bias is added to the scores
    for the choice, not for the weights. Of equal choice scores, that of the lower id comes first.

    With several groups of E / groups consecutive experts, only those of the `top_groups` best groups can be chosen. The
    score of a group is its best choice score, or with a bias the sum of its two best. With `renormalize`, weights are
    divided by their sum; then they are multiplied by `scale`.
    """
    scores = float64(logits)
    if scoring != "softmax_of_top_k":
        scores = 1 / (1 + (-scores).exp()) if scoring == "sigmoid" else scores.softmax(-1)
    choice = scores if bias is None else scores + float64(bias)
    tokens, experts = choice.shape
    if groups > 1:
        grouped = choice.view(tokens, groups, experts // groups)
        best = grouped.sort(dim=-1, descending=True).values[..., : 1 if bias is None else 2].sum(-1)
        order = best.sort(dim=-1, descending=True, stable=True).indices
        chosen = torch.zeros(tokens, groups, dtype=torch.bool).scatter_(1, order[:, :top_groups], value=True)
        choice = grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).view(tokens, experts)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if scoring == "softmax_of_top_k":
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(SMALLEST_SUM)
    return ids, weights * scale


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
    """For each token, the sum over its experts of weight · (down(activation(gate(x)) · up(x))).

    x [T, H], ids [T, K], weights [T, K], gate_up [E, 2 I, H], down [E, H, I], gate_up_bias [E, 2 I] or None, down_bias
    [E, H] or None -> [T, H]. Ids outside [0, E) contribute nothing. Without a gate (`UNGATED`), gate_up has the I rows
    of `up`, here and in the ops below, and down(activation(up(x))) takes the place of the product.
    """
    wide, chosen, factors = (tensor.detach().to("cpu") for tensor in (x.double(), ids, weights.double()))
    first, second = gate_up.detach().to("cpu"), down.detach().to("cpu")
    out = torch.zeros_like(wide)
    for token, position in ((chosen >= 0) & (chosen < len(first))).nonzero().tolist():
        expert = int(chosen[token, position])
        product = first[expert].double() @ wide[token]
        if gate_up_bias is not None:
            product += float64(gate_up_bias[expert])
        result = second[expert].double() @ activated(product, activation)
        if down_bias is not None:
            result += float64(down_bias[expert])
        out[token] += factors[token, position] * result
    return out


def parts(activation: str) -> int:
    """The projections that gate_up has: the gate and `up`, or `up` alone."""
    return 1 if activation in UNGATED else 2


def activated(gate_up: Tensor, activation: str) -> Tensor:
    """The activation in float64: [..., 2 I] -> [..., I], or [..., I] -> [..., I] if it has no gate.

    "swiglu_clamped" is that of gpt-oss: with the gate at most 7 and `up` in [-7, 7], it is
    gate · sigmoid(1.702 gate) · (up + 1). "silu_clamped" is that of HY-V4: "silu" with the gate at most 10 and `up` in
    [-10, 10]. "relu2" has no gate: it is the square of max(up, 0) (So et al. 2021, arXiv:2109.08668).
    """
    if activation == "silu":
        return silu_and_mul(gate_up)
    if activation == "gelu_tanh":
        return gelu_tanh_and_mul(gate_up)
    if activation == "relu2":
        return float64(gate_up).clamp(min=0) ** 2
    gate, up = float64(gate_up).chunk(2, -1)
    if activation == "silu_clamped":
        return silu_and_mul(torch.cat((gate.clamp(max=10), up.clamp(-10, 10)), -1))
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate / (1 + (-1.702 * gate).exp()) * (up + 1)


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
    """As `experts` without biases, with int8 matrices that have a scale per row."""
    first, second = (
        float64(matrix) * float64(scale).unsqueeze(-1)
        for matrix, scale in ((gate_up, gate_up_scale), (down, down_scale))
    )
    return experts(x, ids, weights, first, second, None, None, activation)


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
    """As `experts`, with matrices of the rows of a GGUF file: uint8 [E, rows, bytes per row]."""
    first, second = (
        dequantize_rows(rows.flatten(0, 1), quant_type).view(*rows.shape[:2], -1)
        for rows, quant_type in ((gate_up, gate_up_type), (down, down_type))
    )
    return experts(x, ids, weights, first, second, gate_up_bias, down_bias, activation)


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
    """As `experts`, with float8_e4m3fn matrices and the scales of their blocks.

    gate_up_scale [E, 2 R, C] has the R rows of the gate, if there is one, then those of the up projection.
    """

    def dequantized(matrices: Tensor, scales: Tensor) -> Tensor:
        pairs = zip(matrices, scales, strict=True)
        return torch.stack([dequantize_fp8(matrix, scale, block_outputs, block_inputs) for matrix, scale in pairs])

    count = parts(activation)
    pairs = zip(gate_up.chunk(count, 1), gate_up_scale.chunk(count, 1), strict=True)
    first = torch.cat([dequantized(*pair) for pair in pairs], 1)
    return experts(x, ids, weights, first, dequantized(down, down_scale), gate_up_bias, down_bias, activation)
