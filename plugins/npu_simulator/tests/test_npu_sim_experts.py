"""The operators of mixtures of experts: values against float64, captures, and what is refused."""
# ruff: noqa: E501 - the cases of refusals are a table: one line each

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 5, 4, 2, 16, 8


def npu(tensor: Tensor) -> Tensor:
    return tensor.to("npu:0")


def ids() -> Tensor:
    """int32 [TOKENS, TOP_K]; nobody chooses expert 1."""
    return torch.tensor([[3, 0], [0, 2], [3, 2], [2, 3], [0, 3]], dtype=torch.int32)


@pytest.mark.parametrize(("norm", "biased", "groups", "kept"), [(0, False, 1, 1), (1, True, 4, 2), (0, False, 4, 2)])
def test_gating(sdk: Any, norm: int, biased: bool, groups: int, kept: int) -> None:
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    bias = torch.rand(32, generator=torch.Generator().manual_seed(2)) if biased else None
    options = {"norm_type": norm, "group_count": groups, "k_group": kept, "group_select_mode": int(biased)}
    weights, chosen, scores = sdk.npu_moe_gating_top_k(
        npu(x), 4, bias=None if bias is None else npu(bias), out_flag=True, routed_scaling_factor=2.5, **options
    )
    wide = x.double()
    expected = wide.sigmoid() if norm else wide.softmax(-1)
    torch.testing.assert_close(scores.cpu().double(), expected, rtol=1e-5, atol=1e-7)
    assert chosen.dtype is torch.int32
    for row, experts in enumerate(chosen.cpu().tolist()):
        choice = expected[row] if bias is None else expected[row] + bias.double()
        size = 32 // groups
        ranked = sorted(
            range(groups), key=lambda group: -float(choice[group * size :][:size].topk(1 + biased)[0].sum())
        )
        allowed = [expert for expert in range(32) if expert // size in ranked[:kept]]
        assert experts == sorted(allowed, key=lambda expert: -float(choice[expert]))[:4]
        picked = expected[row, experts]
        picked = picked / picked.sum() if norm else picked
        torch.testing.assert_close(weights[row].cpu().double(), 2.5 * picked, rtol=1e-5, atol=1e-7)


def test_gating_by_a_softmax_over_all(sdk: Any) -> None:
    x = torch.randn(3, 6, dtype=torch.float16)
    weights, chosen, rows = sdk.npu_moe_gating_top_k_softmax(npu(x), None, 2)
    expected = x.double().softmax(-1).topk(2)
    assert weights.dtype is torch.float16
    torch.testing.assert_close(weights.cpu().double(), expected.values, rtol=1e-3, atol=1e-3)
    assert chosen.cpu().tolist() == expected.indices.tolist()
    assert rows.cpu().tolist() == [[0, 3], [1, 4], [2, 5]]


def routing(**changed: Any) -> dict[str, Any]:
    x = torch.arange(TOKENS, dtype=torch.float16)[:, None].expand(TOKENS, HIDDEN).contiguous()
    return {
        "x": npu(x),
        "expert_idx": npu(ids()),
        "active_num": TOKENS * TOP_K,
        "expert_num": EXPERTS,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
        "active_expert_range": [0, EXPERTS],
        **changed,
    }


def test_routing_sorts_rows_by_expert_and_knows_the_way_back(sdk: Any) -> None:
    rows, places, counts, _ = sdk.npu_moe_init_routing_v2(**routing())
    assert counts.cpu().tolist() == [3, 0, 3, 4]
    assert rows[:, 0].cpu().tolist() == [0, 1, 4, 1, 2, 3, 0, 2, 3, 4]
    assert rows[places.long(), 0].cpu().tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    _, scattered, _, _ = sdk.npu_moe_init_routing_v2(**routing(row_idx_type=1))
    assert places.cpu()[scattered.cpu().long()].tolist() == list(range(TOKENS * TOP_K))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("listed", [False, True])
def test_grouped_products(sdk: Any, dtype: torch.dtype, listed: bool) -> None:
    x, weight = torch.randn(10, HIDDEN).to(dtype), torch.randn(EXPERTS, INNER, HIDDEN).to(dtype)
    bias = torch.randn(EXPERTS, INNER) if listed else None
    factor = npu(weight).transpose(1, 2)
    options = {"bias": list(npu(bias))} if bias is not None else {}
    groups = npu(torch.tensor([3, 0, 3, 4]))
    (out,) = sdk.npu_grouped_matmul(
        [npu(x)], list(factor) if listed else [factor], group_list=groups, split_item=3, group_type=0,
        group_list_type=1, **options,
    )  # fmt: skip
    group = torch.tensor([0] * 3 + [2] * 3 + [3] * 4)
    expected = torch.einsum("mk,mnk->mn", x.double(), weight.double()[group])
    expected = expected if bias is None else expected + bias.double()[group]
    limit = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().double(), expected, rtol=limit, atol=limit)


def test_grouped_products_of_int8_are_exact(sdk: Any) -> None:
    x = torch.randint(-128, 128, (4, 1500), dtype=torch.int8)
    weight = torch.randint(-128, 128, (2, 1500, INNER), dtype=torch.int8)
    scale, rows = torch.ones(2, INNER), torch.full((4,), 2.0**-12)
    (out,) = sdk.npu_grouped_matmul(
        [npu(x)], list(npu(weight)), scale=list(npu(scale)), per_token_scale=[npu(rows)],
        group_list=npu(torch.tensor([1, 4])), split_item=2, group_type=0, output_dtype=torch.float16,
    )  # fmt: skip
    group = torch.tensor([0, 1, 1, 1])
    expected = torch.einsum("mk,mkn->mn", x.long(), weight.long()[group]) * 2.0**-12
    assert torch.equal(out.cpu(), expected.to(torch.float16))


@pytest.mark.parametrize("mode", [0, 2])
def test_finalizing_adds_the_rows_of_a_token(sdk: Any, mode: int) -> None:
    rows, scales = torch.randn(TOKENS * TOP_K, HIDDEN), torch.rand(TOKENS, TOP_K)
    bias, skip = torch.randn(EXPERTS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    places = torch.randperm(TOKENS * TOP_K)
    grid = places.view(TOKENS, TOP_K) if mode == 2 else places.view(TOP_K, TOKENS).t()
    out = sdk.npu_moe_finalize_routing(
        npu(rows), npu(skip), None, npu(bias), npu(scales), npu(places.int()), npu(ids()), mode
    )
    parts = rows.double()[grid] + bias.double()[ids().long()]
    expected = skip.double() + (scales.double()[..., None] * parts).sum(1)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_a_capture_follows_other_ids(sdk: Any) -> None:
    """The replay sorts by the ids that are on the card then, and its products take the new counts."""
    npu_module = torch.npu  # type: ignore[attr-defined]
    arguments = routing(x=npu(torch.randn(TOKENS, HIDDEN)))
    weight = npu(torch.randn(EXPERTS, HIDDEN, INNER))

    def work() -> Tensor:
        rows, places, counts, _ = sdk.npu_moe_init_routing_v2(**arguments)
        (out,) = sdk.npu_grouped_matmul(
            [rows], [weight], group_list=counts, split_item=3, group_type=0, group_list_type=1
        )
        return out.index_select(0, places.long())

    graph = npu_module.NPUGraph()
    with npu_module.graph(graph):
        captured = work()
    other = torch.tensor([[1, 0]] * TOKENS, dtype=torch.int32)
    for chosen in (ids(), other):
        arguments["expert_idx"].copy_(chosen)
        graph.replay()
        assert torch.equal(captured.cpu(), work().cpu())


GATING: dict[str, Any] = {"k": 2, "group_count": 2, "k_group": 1}
GROUPED: dict[str, Any] = {"split_item": 3, "group_type": 0, "group_list_type": 1}


def gating(**changed: Any) -> dict[str, Any]:
    return {"x": npu(torch.zeros(3, 8)), **GATING, **changed}


def grouped(**changed: Any) -> dict[str, Any]:
    arguments = {
        "x": [npu(torch.zeros(3, HIDDEN).half())],
        "weight": [npu(torch.zeros(2, HIDDEN, INNER).half())],
        "group_list": npu(torch.tensor([1, 2])),
    }
    return {**arguments, **GROUPED, **changed}


def finalized(**changed: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "expanded_permuted_rows": npu(torch.zeros(4, HIDDEN)),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": npu(torch.zeros(2, 2)),
        "expanded_src_to_dst_row": npu(torch.zeros(4, dtype=torch.int32)),
        "export_for_source_row": None,
        "drop_pad_mode": 2,
    }
    return {**arguments, **changed}


def half(*shape: int) -> Tensor:
    return npu(torch.zeros(shape, dtype=torch.float16))


def int8(*shape: int) -> Tensor:
    return npu(torch.zeros(shape, dtype=torch.int8))


REFUSALS: list[tuple[str, Callable[..., dict[str, Any]], Callable[[], dict[str, Any]], str]] = [
    ("npu_moe_gating_top_k", gating, lambda: {"x": half(3, 2049), "group_count": 1}, r"x: is of 2049 experts, may have at most 2048"),
    ("npu_moe_gating_top_k", gating, lambda: {"group_count": 3}, r"group_count: is 3, must divide the 8 experts"),
    ("npu_moe_gating_top_k", gating, lambda: {"group_count": 4}, r"group_count: is 4, leaves 2 experts in a group"),
    ("npu_moe_gating_top_k", gating, lambda: {"x": half(3, 640), "group_count": 128}, r"group_count: is 128, pads the experts to 4096 of 2048"),
    ("npu_moe_gating_top_k", gating, lambda: {"k_group": 3}, r"k_group: is 3, must be 1 to group_count, 2"),
    ("npu_moe_gating_top_k", gating, lambda: {"k": 5}, r"k: is 5, must be 1 to 4"),
    ("npu_moe_gating_top_k", gating, lambda: {"renorm": 1}, r"renorm: is 1, must be 0"),
    ("npu_moe_gating_top_k", gating, lambda: {"norm_type": 2}, r"norm_type: is 2, must be 0 or 1"),
    ("npu_moe_gating_top_k", gating, lambda: {"bias": half(8)}, r"bias: is torch.float16, must have the dtype of x"),
    ("npu_moe_init_routing_v2", routing, lambda: {"expert_idx": npu(ids().long())}, r"expert_idx: is torch.int64, must be int32"),
    ("npu_moe_init_routing_v2", routing, lambda: {"expert_idx": npu(ids()[1:])}, r"expert_idx: is of 4 rows, must have the 5 rows of x"),
    ("npu_moe_init_routing_v2", routing, lambda: {"expert_idx": npu(ids() + 1)}, r"expert_idx: is of an unknown expert, must be 0 to 3"),
    ("npu_moe_init_routing_v2", routing, lambda: {"active_num": 3}, r"active_num: is 3, must be the size of expert_idx, 10"),
    ("npu_moe_init_routing_v2", routing, lambda: {"active_expert_range": [0, 2]}, r"active_expert_range: is \[0, 2\], only \[0, 4\]"),
    ("npu_moe_init_routing_v2", routing, lambda: {"expert_tokens_num_flag": False}, r"expert_tokens_num_flag: is False, must be True"),
    ("npu_moe_init_routing_v2", routing, lambda: {"quant_mode": 0}, r"quant_mode: is 0, only -1 is simulated"),
    ("npu_moe_init_routing_v2", routing, lambda: {"drop_pad_mode": 1}, r"drop_pad_mode: is 1, must be 0"),
    ("npu_grouped_matmul", grouped, lambda: {"x": [torch.zeros(3, HIDDEN).half()]}, r"x: is on cpu, must be on npu:0"),
    ("npu_grouped_matmul", grouped, lambda: {"x": [half(6, HIDDEN)[::2]]}, r"x: is not contiguous"),
    ("npu_grouped_matmul", grouped, lambda: {"weight": [half(2, 8, INNER)]}, r"weight: is of shape \(8, 8\), must have shape \(16, 8\)"),
    ("npu_grouped_matmul", grouped, lambda: {"weight": [npu(torch.zeros(2, HIDDEN, INNER))]}, r"weight: is torch.float32, must have the dtype of x"),
    ("npu_grouped_matmul", grouped, lambda: {"weight": [half(HIDDEN, INNER)] * 129}, r"weight: is 129 tensors, must be 1 to 128"),
    ("npu_grouped_matmul", grouped, lambda: {"x": [half(3, 65536)], "weight": [half(2, 65536, 1)]}, r"x: is of 65536 columns, must have less than 65536"),
    ("npu_grouped_matmul", grouped, lambda: {"bias": [half(2, INNER)]}, r"bias: is for several groups of one weight, must have one dimension each"),
    ("npu_grouped_matmul", grouped, lambda: {"weight": [half(HIDDEN, INNER)] * 2, "bias": [half(INNER)]}, r"bias: is 1 tensors, must be as many as the 2 weights"),
    ("npu_grouped_matmul", grouped, lambda: {"scale": [half(INNER)]}, r"scale: is given, must be None for factors that are not int8"),
    ("npu_grouped_matmul", grouped, lambda: {"split_item": 0}, r"split_item: is 0, only 2 and 3"),
    ("npu_grouped_matmul", grouped, lambda: {"group_list": npu(torch.tensor([1, 1]))}, r"group_list: is \[1, 1\], must add up to the 3 rows of x"),
    ("npu_grouped_matmul", grouped, lambda: {"group_list": npu(torch.tensor([4, -1]))}, r"group_list: is \[4, -1\], must not have a negative group"),
    ("npu_grouped_matmul", grouped, lambda: {"weight": [half(1, HIDDEN, INNER)], "group_list": npu(torch.tensor([3]))}, r"group_list: is of one group, must have more for group_list_type 1"),
    ("npu_grouped_matmul", grouped, lambda: {"x": [int8(3, HIDDEN)], "weight": [int8(HIDDEN, INNER)] * 2}, r"output_dtype: is torch.int8, must be bfloat16 or float16"),
    ("npu_grouped_matmul", grouped, lambda: {"x": [int8(3, HIDDEN)], "weight": [int8(HIDDEN, INNER)] * 2, "output_dtype": torch.bfloat16, "scale": [npu(torch.zeros(INNER))] * 2}, r"scale: is torch.float32, must be bfloat16"),
    ("npu_moe_finalize_routing", finalized, lambda: {"scales": half(2, 2)}, r"scales: is torch.float16, must have the dtype of expanded_permuted_rows"),
    ("npu_moe_finalize_routing", finalized, lambda: {"scales": npu(torch.zeros(3, 2))}, r"expanded_permuted_rows: is of shape \(4, 16\), must have shape \(6, 16\)"),
    ("npu_moe_finalize_routing", finalized, lambda: {"skip2": npu(torch.zeros(2, HIDDEN))}, r"skip2: is given, must be None if skip1 is"),
    ("npu_moe_finalize_routing", finalized, lambda: {"bias": npu(torch.zeros(3, HIDDEN))}, r"export_for_source_row: is None, must be given with bias"),
    ("npu_moe_finalize_routing", finalized, lambda: {"drop_pad_mode": 1}, r"drop_pad_mode: is 1, only 0 and 2"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSALS)), ids=lambda case: f"{REFUSALS[case][0]}-{case}")
def test_operators_refuse(sdk: Any, case: int) -> None:
    operator, base, change, refusal = REFUSALS[case]
    with pytest.raises(RuntimeError, match=f"^{operator}: {refusal}"):
        getattr(sdk, operator)(**base(**change()))


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("npu_moe_gating_top_k", gating),
        ("npu_moe_init_routing_v2", routing),
        ("npu_grouped_matmul", grouped),
        ("npu_moe_finalize_routing", finalized),
    ],
)
def test_the_calls_that_the_cases_start_from_are_allowed(
    sdk: Any, operator: str, arguments: Callable[..., dict[str, Any]]
) -> None:
    assert getattr(sdk, operator)(**arguments()) is not None
