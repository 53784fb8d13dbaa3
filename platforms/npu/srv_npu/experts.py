"""Mixtures of experts with torch_npu's operators, with the signatures of `srv_kernels.contracts`.

    route_experts   npu_moe_gating_top_k, or npu_moe_gating_top_k_softmax where only the chosen logits are normalized
    experts         npu_moe_init_routing_v2 (rows sorted by expert) ── npu_grouped_matmul ── activation
                    ── npu_grouped_matmul ── npu_moe_finalize_routing (the weighted sum of a token's rows)

No value is read on the host, so that steps can be captured. Weights are used as they are loaded: the second operand of
a product may be transposed. Ids outside [0, E), which the operators do not take, become expert 0 with a weight of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from srv.models.layers.op_layer import op_layers
from srv.platform.experts import EXPERTS, INT8
from srv_kernels import expert_reference
from srv_kernels.expert_oracles import SMALLEST_SUM
from srv_npu.op_specs import ASCEND
from srv_npu.sdk import Sdk

_BY_MAXIMUM, _BY_TWO_BEST = 0, 1  # how groups are ordered
_NORMS = {"softmax": 0, "sigmoid": 1}
_SMALLEST_GROUP = 3  # experts
_MAX_PADDED, _ALIGNED = 2048, 32  # experts, when groups are padded to a multiple of 32
_ONE_RESULT, _GROUPS_OF_ROWS = 3, 0
_ENDS, _COUNTS = 0, 1  # kinds of group lists
_TOKEN_ROWS_TOGETHER = 2  # the order of row indices: those of a token are adjacent


class Factor(NamedTuple):
    """The second operand of npu_grouped_matmul: matrices [K, N] of `experts`, in one tensor [E, K, N] or one each.

    `constants`: the biases or the scales, [N] of each expert, by the operator's names.
    """

    experts: int
    matrices: Sequence[Tensor]
    constants: Mapping[str, Sequence[Tensor]]


class ExpertOperators:
    """torch_npu's operators with the signatures of the contracts; the first call loads the SDK."""

    def __init__(self, sdk: Callable[[], Sdk]) -> None:
        self._sdk = sdk

    def route_experts(
        self,
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

        Groups of one or two experts, and a bias on logits that are no scores, are computed by PyTorch's operators.
        """
        arguments = (top_k, scoring, renormalize, groups, top_groups, scale)
        if not _takes(logits.shape[1], bias is not None, scoring, groups) or logits.shape[0] == 0:
            return expert_reference.route_experts(logits, bias, *arguments)
        sdk = self._sdk()
        if scoring not in _NORMS:
            weights, ids, _ = sdk.npu_moe_gating_top_k_softmax(logits.contiguous(), None, top_k)
            return ids.long(), weights / weights.sum(-1, keepdim=True) * scale
        # The operator divides the weights of a sigmoid by their sum, and not those of a softmax.
        plain = scoring == "sigmoid" and not renormalize
        weights, ids, scores = sdk.npu_moe_gating_top_k(
            logits,
            top_k,
            bias=bias,
            k_group=top_groups,
            group_count=groups,
            group_select_mode=_BY_MAXIMUM if bias is None else _BY_TWO_BEST,
            norm_type=_NORMS[scoring],
            out_flag=plain,
            routed_scaling_factor=1.0 if plain or scoring == "softmax" else scale,
        )
        ids = ids.long()
        if plain:
            return ids, scores.gather(1, ids) * scale
        if scoring == "softmax":
            if renormalize:
                weights = weights / weights.sum(-1, keepdim=True).clamp_min(SMALLEST_SUM)
            weights = weights * scale
        return ids, weights

    def experts(
        self,
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
        [E, H] or None -> [T, H]."""

        factors = _plain(gate_up, gate_up_bias), _plain(down, None)
        return self.grouped_experts(x, ids, weights, *factors, down_bias, activation)

    def experts_int8(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        activation: str,
    ) -> Tensor:
        """As `experts`, with int8 weights and a float32 scale per output. The rows of both products are quantized."""
        factors = _int8(gate_up, gate_up_scale, x.dtype), _int8(down, down_scale, x.dtype)
        return self.grouped_experts(x, ids, weights, *factors, None, activation)

    def grouped_experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        first: Factor,
        second: Factor,
        down_bias: Tensor | None,
        activation: str,
    ) -> Tensor:
        """`experts` or `experts_int8` with matrices in the form that the operator takes."""

        def compute(rows: Tensor, counts: Tensor) -> Tensor:
            return self._product(self._activated(self._product(rows, first, counts), activation), second, counts)

        return self._routed(x, ids, weights, first.experts, compute, down_bias)

    def _routed(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        count: int,
        compute: Callable[[Tensor, Tensor], Tensor],
        down_bias: Tensor | None,
    ) -> Tensor:
        """The weighted sums of `compute(rows by expert, rows per expert)`, with the bias of each expert."""
        if ids.numel() == 0:
            return torch.zeros_like(x)
        is_local = (ids >= 0) & (ids < count)
        chosen = torch.where(is_local, ids, 0).int()
        factors = torch.where(is_local, weights, 0.0).to(x.dtype)
        rows, places, counts, _ = self._sdk().npu_moe_init_routing_v2(
            x.contiguous(),
            chosen,
            active_num=ids.numel(),
            expert_num=count,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            quant_mode=-1,
            active_expert_range=[0, count],
            row_idx_type=0,
        )
        results = compute(rows, counts)
        bias_experts = None if down_bias is None else chosen
        out: Tensor = self._sdk().npu_moe_finalize_routing(
            results, None, None, down_bias, factors, places, bias_experts, _TOKEN_ROWS_TOGETHER
        )
        return out

    def _product(self, rows: Tensor, factor: Factor, counts: Tensor) -> Tensor:
        """rows [M, K], sorted by expert, times each expert's matrix [K, N]: [M, N]. For int8, rows are quantized."""
        kind = _COUNTS if len(counts) > 1 else _ENDS  # of one group they are equal, and only ends are taken
        options: dict[str, object] = dict(factor.constants)
        if factor.matrices[0].dtype == torch.int8:
            options["output_dtype"] = rows.dtype
            rows, row_scale = self._sdk().npu_dynamic_quant(rows)
            options["per_token_scale"] = [row_scale]
        out: Tensor = self._sdk().npu_grouped_matmul(
            [rows],
            factor.matrices,
            group_list=counts,
            split_item=_ONE_RESULT,
            group_type=_GROUPS_OF_ROWS,
            group_list_type=kind,
            **options,
        )[0]
        return out

    def _activated(self, gate_up: Tensor, activation: str) -> Tensor:
        """[M, 2 I] -> [M, I]."""
        if activation == "silu":
            out: Tensor = self._sdk().npu_swiglu(gate_up, -1)
            return out
        return expert_reference.activate(gate_up, activation)


def prepare_experts(operators: ExpertOperators, model: nn.Module) -> None:
    """List the matrices of experts and convert their constants once; called after loading."""
    for layer in op_layers(model):
        if layer.op not in (EXPERTS, INT8) or layer.implementation != ASCEND:
            continue
        (operands,) = layer.operands()
        if layer.op == EXPERTS:
            first, second = _plain(operands["gate_up"], operands["gate_up_bias"]), _plain(operands["down"], None)
        else:
            first = _int8(operands["gate_up"], operands["gate_up_scale"], layer.dtype)
            second = _int8(operands["down"], operands["down_scale"], layer.dtype)
        layer.kernel = partial(
            operators.grouped_experts,
            first=first,
            second=second,
            down_bias=operands.get("down_bias"),
            activation=operands["activation"],
        )


def _plain(weight: Tensor, bias: Tensor | None) -> Factor:
    """weight [E, N, K], bias [E, N] or None. With a bias, the operator takes a matrix per expert."""
    matrices = weight.transpose(1, 2)
    if bias is None:
        return Factor(len(weight), [matrices], {})
    return Factor(len(weight), list(matrices), {"bias": list(bias.float() if weight.dtype == torch.bfloat16 else bias)})


def _int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Factor:
    """weight int8 [E, N, K], scale float32 [E, N]. The operator takes the scales of a bfloat16 result in bfloat16."""
    scales = list(scale.to(dtype) if dtype == torch.bfloat16 else scale)
    return Factor(len(weight), list(weight.transpose(1, 2)), {"scale": scales})


def _takes(experts: int, biased: bool, scoring: str, groups: int) -> bool:
    """Whether an operator takes such logits."""
    if scoring not in _NORMS:
        return groups == 1 and not biased
    size = experts // groups
    return size >= _SMALLEST_GROUP and -(-size // _ALIGNED) * _ALIGNED * groups <= _MAX_PADDED
