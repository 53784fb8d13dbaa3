"""Names, order and defaults of all arguments, copied from torch_npu's declarations (op_plugin_functions.yaml)."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

UNBOUNDED = 2147483647

ATTENTION = (
    "query key value * pse_shift=None atten_mask=None actual_seq_lengths=None actual_seq_lengths_kv=None "
    "dequant_scale1=None quant_scale1=None dequant_scale2=None quant_scale2=None quant_offset2=None "
    "antiquant_scale=None antiquant_offset=None key_antiquant_scale=None key_antiquant_offset=None "
    "value_antiquant_scale=None value_antiquant_offset=None block_table=None query_padding_size=None "
    "kv_padding_size=None key_shared_prefix=None value_shared_prefix=None actual_shared_prefix_len=None "
    "query_rope=None key_rope=None key_rope_antiquant_scale=None num_heads=1 scale=1.0 pre_tokens=2147483647 "
    "next_tokens=2147483647 input_layout='BSH' num_key_value_heads=0 sparse_mode=0 inner_precise=0 block_size=0 "
    "antiquant_mode=0 key_antiquant_mode=0 value_antiquant_mode=0 softmax_lse_flag=False"
)

SIGNATURES = {
    "npu::npu_fused_infer_attention_score": ATTENTION,
    "npu::npu_fused_infer_attention_score.out": ATTENTION + " workspace=None attention_out softmax_lse",
    "npu::_npu_fused_infer_attention_score_get_max_workspace": ATTENTION,
    "npu::npu_scatter_nd_update_": "self indices updates",
    "npu::npu_rms_norm": "self gamma epsilon=1e-06",
    "npu::npu_add_rms_norm": "x1 x2 gamma epsilon=1e-06",
    "npu::npu_swiglu": "self dim=-1",
    "npu::npu_rotary_mul": "self r1 r2 rotary_mode='half' rotate=None",
    "npu::npu_top_k_top_p": "logits p=None k=None",
    "npu::npu_dynamic_quant": (
        "input * smooth_scales=None group_index=None dst_type=None quant_mode='pertoken' dst_type_max=0.0"
    ),
    "npu::npu_quantize": "self scales zero_points dtype axis=1 div_mode=True",
    "npu::npu_quant_matmul": (
        "x1 x2 scale * offset=None pertoken_scale=None bias=None output_dtype=None x1_dtype=None x2_dtype=None "
        "pertoken_scale_dtype=None scale_dtype=None group_sizes=None y_scale=None"
    ),
    "npu::npu_moe_gating_top_k": (
        "x k * bias=None k_group=1 group_count=1 group_select_mode=0 renorm=0 norm_type=0 out_flag=False "
        "routed_scaling_factor=1.0 eps=1e-20"
    ),
    "npu::npu_moe_gating_top_k_softmax": "x finished=None k=1",
    "npu::npu_moe_init_routing_v2": (
        "x expert_idx * scale=None offset=None active_num=-1 expert_capacity=-1 expert_num=-1 drop_pad_mode=0 "
        "expert_tokens_num_type=0 expert_tokens_num_flag=False quant_mode=0 active_expert_range=[] row_idx_type=0"
    ),
    "npu::npu_grouped_matmul": (
        "x weight * bias=None scale=None offset=None antiquant_scale=None antiquant_offset=None per_token_scale=None "
        "group_list=None activation_input=None activation_quant_scale=None activation_quant_offset=None split_item=0 "
        "group_type=None group_list_type=0 act_type=0 tuning_config=None output_dtype=None x_dtype=None "
        "weight_dtype=None scale_dtype=None per_token_scale_dtype=None"
    ),
    "npu::npu_moe_finalize_routing": (
        "expanded_permuted_rows skip1 skip2 bias scales expanded_src_to_dst_row export_for_source_row drop_pad_mode=0"
    ),
}

RESULTS = {
    "npu::npu_fused_infer_attention_score": 2,
    "npu::npu_fused_infer_attention_score.out": 2,
    "npu::_npu_fused_infer_attention_score_get_max_workspace": 1,
    "npu::npu_scatter_nd_update_": 1,
    "npu::npu_rms_norm": 2,
    "npu::npu_add_rms_norm": 3,
    "npu::npu_swiglu": 1,
    "npu::npu_rotary_mul": 1,
    "npu::npu_top_k_top_p": 1,
    "npu::npu_dynamic_quant": 2,
    "npu::npu_quantize": 1,
    "npu::npu_quant_matmul": 1,
    "npu::npu_moe_gating_top_k": 3,
    "npu::npu_moe_gating_top_k_softmax": 3,
    "npu::npu_moe_init_routing_v2": 4,
    "npu::npu_grouped_matmul": 1,
    "npu::npu_moe_finalize_routing": 1,
}


def schema_of(name: str) -> torch.FunctionSchema:
    library, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, library), base)
    return getattr(packet, overload or "default")._schema


def signature(schema: torch.FunctionSchema) -> str:
    """The arguments of a schema, in the form of `SIGNATURES`."""
    parts: list[str] = []
    for argument in schema.arguments:
        if argument.kwarg_only and "*" not in parts:
            parts.append("*")
        parts.append(f"{argument.name}={argument.default_value!r}" if argument.has_default_value() else argument.name)
    return " ".join(parts)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_torch_npus(sdk: Any, name: str) -> None:
    assert signature(schema_of(name)) == SIGNATURES[name]
    assert len(schema_of(name).returns) == RESULTS[name]


def test_the_table_has_every_operator(sdk: Any) -> None:
    from srv_npu_simulator.operators.schemas import OPERATORS

    assert {f"npu::{operator.name}" for operator in OPERATORS} == SIGNATURES.keys()


def test_there_are_exactly_the_operators_that_the_platform_calls() -> None:
    spec = importlib.util.find_spec("srv_npu")
    assert spec is not None
    assert spec.origin is not None
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in Path(spec.origin).parent.rglob("*.py")]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {name for name in read if re.match("_?npu_", name)} - {"npu_format_cast"}  # a function of the SDK
    assert {name.removeprefix("npu::").removesuffix(".out") for name in SIGNATURES} == called


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_operator_is_on_the_sdk(sdk: Any, name: str) -> None:
    base, _, overload = name.partition("::")[2].partition(".")
    operator = getattr(sdk, base)
    assert callable(getattr(operator, overload) if overload else operator)


def test_an_unknown_argument_is_refused(sdk: Any) -> None:
    x = torch.zeros(2, 8, device="npu:0")
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'eps' for operator 'npu::npu_rms_norm'"):
        sdk.npu_rms_norm(x, x[0], eps=1e-5)
    with pytest.raises(RuntimeError, match=r"Unknown keyword argument 'head_num'.*npu_fused_infer_attention_score"):
        sdk.npu_fused_infer_attention_score(x, x, x, scale=1.0, head_num=1)
