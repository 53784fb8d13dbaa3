"""Operators around the products of experts, on host views: the choice of experts, sorting by expert, and the sum.

Limits are those of op-plugin's documentation (docs/context/torch_npu-npu_moe_*.md) for A2 and A3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv_npu_simulator.operators.checks import FLOATS, Rules

MAX_EXPERTS = 2048  # that npu_moe_gating_top_k takes
_MAX_TOP_K = 1024  # that npu_moe_gating_top_k_softmax takes
_MAX_ROUTED = 10240  # experts among which npu_moe_init_routing_v2 sorts
_ALIGNED = 32  # experts to whose multiple a group is padded


def _check_logits(rules: Rules, x: Tensor, k: int, most: int) -> None:
    rules.dtype("x", x, FLOATS)
    rules.require(1 <= k <= most, "k", k, f"must be 1 to {most}")


def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, k] like x, ids int32 [T, k], float32 scores [T, experts], unset unless out_flag).

    Scores are a softmax (norm_type 0) or a sigmoid (1), to which the bias is added for the choice. Groups are ordered
    by their best score (group_select_mode 0), or by the sum of their two best (1). Weights of a sigmoid are divided by
    their sum + eps.
    """
    rules = Rules("npu_moe_gating_top_k")
    rules.dims("x", x, 2)
    tokens, experts = x.shape
    rules.require(experts <= MAX_EXPERTS, "x", f"of {experts} experts", f"may have at most {MAX_EXPERTS}")
    whole = group_count > 0 and experts % group_count == 0
    rules.require(whole, "group_count", group_count, f"must divide the {experts} experts")
    size = experts // group_count
    rules.require(size > 2, "group_count", group_count, f"leaves {size} experts in a group, and must leave more than 2")
    padded = -(-size // _ALIGNED) * _ALIGNED * group_count
    rules.require(padded <= MAX_EXPERTS, "group_count", group_count, f"pads the experts to {padded} of {MAX_EXPERTS}")
    rules.require(1 <= k_group <= group_count, "k_group", k_group, f"must be 1 to group_count, {group_count}")
    _check_logits(rules, x, k, size * k_group)
    rules.require(group_select_mode in (0, 1), "group_select_mode", group_select_mode, "must be 0 or 1")
    rules.require(renorm == 0, "renorm", renorm, "must be 0")
    rules.require(norm_type in (0, 1), "norm_type", norm_type, "must be 0 or 1")
    if bias is not None:
        rules.same_dtype("bias", bias, "x", x.dtype)
        rules.shape("bias", bias, (experts,), "one per expert")
    scores = x.float().sigmoid() if norm_type == 1 else x.float().softmax(-1)
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        grouped = choice.view(tokens, group_count, size)
        best = grouped.topk(2 if group_select_mode == 1 else 1).values.sum(-1)
        chosen = torch.zeros_like(best).scatter(1, _first(best, k_group), 1.0)
        choice = grouped.masked_fill(chosen[..., None] == 0, -torch.inf).view(tokens, experts)
    ids = _first(choice, k)
    weights = scores.gather(1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    shown = scores if out_flag else torch.full_like(scores, torch.nan)
    return (weights * routed_scaling_factor).to(x.dtype), ids.int(), shown


def _first(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest, in descending order; of equal ones the lower comes first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(the k largest of each row's softmax like x, their ids int32, int32 row_idx: rank * rows + row)."""
    rules = Rules("npu_moe_gating_top_k_softmax")
    rules.absent(finished=finished)
    rules.dims("x", x, 2, 3)
    _check_logits(rules, x, k, min(x.shape[-1], _MAX_TOP_K))
    scores = x.float().softmax(-1)
    ids = _first(scores, k)
    rows = ids.numel() // k
    places = torch.arange(rows * k, dtype=torch.int32, device=x.device).view(k, rows).t().reshape(ids.shape)
    return scores.gather(-1, ids).to(x.dtype), ids.int(), places.contiguous()


def init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x's rows by expert [T * K, H], int32 row index [T * K], int64 tokens per expert [E], unset scales [T * K]).

    row_idx_type 0: the row of each pair of a token and its expert, pairs in order; 1: the pair of each row. All experts
    must be active, and nothing is quantized.
    """
    rules = Rules("npu_moe_init_routing_v2")
    pairs = _check_routing(rules, x, expert_idx, active_num, expert_num, active_expert_range)
    rules.absent(scale=scale, offset=offset)
    rules.require(drop_pad_mode == 0, "drop_pad_mode", drop_pad_mode, "must be 0")
    rules.require(expert_tokens_num_type == 1, "expert_tokens_num_type", expert_tokens_num_type, "only 1 is simulated")
    rules.require(expert_tokens_num_flag, "expert_tokens_num_flag", expert_tokens_num_flag, "must be True")
    rules.require(quant_mode == -1, "quant_mode", quant_mode, "only -1 is simulated: quantize the rows afterwards")
    rules.require(row_idx_type in (0, 1), "row_idx_type", row_idx_type, "must be 0 or 1")
    flat = expert_idx.flatten().long()
    in_range = flat.numel() == 0 or (int(flat.min()) >= 0 and int(flat.max()) < expert_num)
    rules.require(in_range, "expert_idx", "of an unknown expert", f"must be 0 to {expert_num - 1}")
    order = flat.argsort(stable=True)
    index = order if row_idx_type == 1 else order.argsort()
    counts = torch.bincount(flat, minlength=expert_num)
    unset = torch.full((pairs,), torch.nan)
    return x.index_select(0, order // max(1, expert_idx.shape[1])), index.int(), counts, unset


def routed_like(
    x: Tensor, expert_idx: Tensor, *, expert_num: int = -1, **options: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The shapes of `init_routing_v2`."""
    pairs = expert_idx.numel()
    counts = expert_idx.new_empty(expert_num, dtype=torch.int64)
    unset = x.new_empty(pairs, dtype=torch.float32)
    return x.new_empty(pairs, x.shape[1]), expert_idx.new_empty(pairs), counts, unset


def _check_routing(
    rules: Rules, x: Tensor, expert_idx: Tensor, active_num: int, expert_num: int, active: list[int] | None
) -> int:
    """The number of pairs."""
    rules.dims("x", x, 2)
    rules.dtype("x", x, (*FLOATS, torch.int8))
    rules.dims("expert_idx", expert_idx, 2)
    rules.dtype("expert_idx", expert_idx, (torch.int32,))
    rows = f"must have the {x.shape[0]} rows of x"
    rules.require(expert_idx.shape[0] == x.shape[0], "expert_idx", f"of {expert_idx.shape[0]} rows", rows)
    pairs = expert_idx.numel()
    rules.require(active_num == pairs, "active_num", active_num, f"must be the size of expert_idx, {pairs}")
    rules.require(0 < expert_num <= _MAX_ROUTED, "expert_num", expert_num, f"must be 1 to {_MAX_ROUTED}")
    whole = list(active or []) == [0, expert_num]
    rules.require(whole, "active_expert_range", active, f"only [0, {expert_num}], all experts, is simulated")
    return pairs


def finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
) -> Tensor:
    """[T, H]: skip1 + skip2 + the sum of each token's rows + their experts' bias, each times its scale, in float32.

    expanded_src_to_dst_row int32 [T * K]: with drop_pad_mode 2 a token's K rows are together, with 0 they are T apart.
    """
    rules = Rules("npu_moe_finalize_routing")
    rows = expanded_permuted_rows
    rules.dims("expanded_permuted_rows", rows, 2)
    rules.dtype("expanded_permuted_rows", rows, FLOATS)
    rules.require(drop_pad_mode in (0, 2), "drop_pad_mode", drop_pad_mode, "only 0 and 2, without drops, are simulated")
    if scales is None:
        rules.require(False, "scales", None, "but the simulator has no reference without: pass ones")
    assert scales is not None
    for name, one in (("scales", scales), ("bias", bias), ("skip1", skip1), ("skip2", skip2)):
        if one is not None:
            rules.dims(name, one, 2)
            rules.same_dtype(name, one, "expanded_permuted_rows", rows.dtype)
    tokens, top_k = scales.shape
    rules.require(skip1 is not None or skip2 is None, "skip2", "given", "must be None if skip1 is")
    rules.shape("expanded_permuted_rows", rows, (tokens * top_k, rows.shape[1]), "a row per element of scales")
    rules.dtype("expanded_src_to_dst_row", expanded_src_to_dst_row, (torch.int32,))
    rules.shape("expanded_src_to_dst_row", expanded_src_to_dst_row, (tokens * top_k,), "one per row")
    index = expanded_src_to_dst_row.long()
    index = index.view(tokens, top_k) if drop_pad_mode == 2 else index.view(top_k, tokens).t()
    wide = rows.float()[index]
    if bias is not None:
        has_rows = export_for_source_row is not None
        rules.require(has_rows, "export_for_source_row", None, "must be given with bias")
        assert export_for_source_row is not None
        rules.dtype("export_for_source_row", export_for_source_row, (torch.int32,))
        rules.shape("export_for_source_row", export_for_source_row, (tokens, top_k))
        wide = wide + bias.float()[export_for_source_row.long()]
    out = torch.zeros(tokens, rows.shape[1], device=rows.device)
    for skip in (skip1, skip2):
        if skip is not None:
            rules.shape("skip", skip, out.shape)
            out = out + skip.float()
    for rank in range(top_k):
        out = out + scales.float()[:, rank, None] * wide[:, rank]
    return out.to(rows.dtype)
