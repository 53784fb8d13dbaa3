"""Every operator that the NPU platform calls: its schema as torch_npu declares it, and its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from srv_npu_simulator.operators import attention, cache, norms, quantised, rotary, sampling

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
)
