"""Every operator that the NPU platform calls: its schema as torch_npu declares it, and its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from srv_npu_simulator.operators import (
    attention,
    cache,
    expert_routing,
    grouped_matmul,
    norms,
    quantised,
    rotary,
    sampling,
)

LIBRARY = "npu"  # operators are at torch.ops.npu

_ATTENTION = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, "
    "Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
    "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, "
    "float scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
    "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, int antiquant_mode=0, "
    "int key_antiquant_mode=0, int value_antiquant_mode=0, bool softmax_lse_flag=False"
)


@dataclass(frozen=True, slots=True)
class Operator:
    """`reference`: runs on host views. `updatable`: host values that `NPUGraph.update` can change.

    `shapes`: computes the results' shapes from "meta" tensors, where `reference` cannot.
    """

    schema: str
    reference: Callable[..., Any]
    updatable: tuple[str, ...] = ()
    shapes: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """With the overload, if there is one: "npu_x.out"."""
        return self.schema.partition("(")[0]


_LENGTHS = ("actual_seq_lengths", "actual_seq_lengths_kv")

OPERATORS = (
    Operator(
        f"npu_fused_infer_attention_score({_ATTENTION}) -> (Tensor, Tensor)",
        attention.fused_infer_attention_score,
        updatable=_LENGTHS,
        shapes=attention.results_like,
    ),
    Operator(
        f"npu_fused_infer_attention_score.out({_ATTENTION}, Tensor? workspace=None, Tensor(a!) attention_out, "
        "Tensor(b!) softmax_lse) -> (Tensor(a!), Tensor(b!))",
        attention.fused_infer_attention_score_out,
        updatable=_LENGTHS,
    ),
    Operator(
        f"_npu_fused_infer_attention_score_get_max_workspace({_ATTENTION}) -> Tensor",
        attention.max_workspace,
        shapes=attention.workspace_like,
    ),
    Operator(
        "npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)",
        cache.scatter_nd_update_,
    ),
    Operator("npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)", norms.rms_norm),
    Operator(
        "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
        norms.add_rms_norm,
    ),
    Operator("npu_swiglu(Tensor self, int dim=-1) -> Tensor", norms.swiglu),
    Operator(
        "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
        rotary.rotary_mul,
    ),
    Operator("npu_top_k_top_p(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor", sampling.top_k_top_p),
    Operator(
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None, "
        "str quant_mode='pertoken', float dst_type_max=0.0) -> (Tensor, Tensor)",
        quantised.dynamic_quant,
    ),
    Operator(
        "npu_quantize(Tensor self, Tensor scales, Tensor? zero_points, int dtype, int axis=1, bool div_mode=True) "
        "-> Tensor",
        quantised.quantize,
    ),
    Operator(
        "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, "
        "Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
        "int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) "
        "-> Tensor",
        quantised.quant_matmul,
    ),
    Operator(
        "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1, int group_count=1, "
        "int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False, "
        "float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor, Tensor)",
        expert_routing.gating_top_k,
    ),
    Operator(
        "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)",
        expert_routing.gating_top_k_softmax,
    ),
    Operator(
        "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
        "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
        "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=0, "
        "int[2] active_expert_range=[], int row_idx_type=0) -> (Tensor, Tensor, Tensor, Tensor)",
        expert_routing.init_routing_v2,
        shapes=expert_routing.routed_like,
    ),
    Operator(
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
        "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
        "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
        "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
        "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
        "int? per_token_scale_dtype=None) -> Tensor[]",
        grouped_matmul.grouped_matmul,
        shapes=grouped_matmul.results_like,
    ),
    Operator(
        "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, "
        "Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0) "
        "-> Tensor",
        expert_routing.finalize_routing,
    ),
)
