"""ERNIE 4.5 with experts, whose softmax scores are corrected for the choice, and shared experts, in some layers.

Torch-free. Layers of multi-token prediction are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srv.models.blueprint import MoE, Part, Tensors
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes
from srv.models.families.builders.layer_types import check_experts
from srv.models.families.glm import rotated_dims
from srv.models.layers.moe_config import COUNT_FIELDS, Routing
from srv.models.unsupported import UnsupportedConfig, refuse_unless

_SMALLEST_SUM = 1e-12  # sums of weights below it do not occur


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"moe_gate_act": ("softmax",), "moe_norm_min": (_SMALLEST_SUM,)})
    sizes, bias = decoder_sizes(config, reads=COUNT_FIELDS), bool(config["use_bias"])
    step, first, last = (config[f"moe_layer_{name}"] for name in ("interval", "start_index", "end_index"))
    if step < 1:
        raise UnsupportedConfig(f"moe_layer_interval = {step} is not a number of layers")
    last = sizes.layers - 1 if last in (None, -1) else last
    is_sparse = [(index + 1) % step == 0 and first <= index <= last for index in range(sizes.layers)]
    sparse, dense = _experts(config, sizes, bias), parts.mlp(sizes, bias)
    feeding = [sparse if each else dense for each in is_sparse]
    layers = parts.pre_norm_layers(sizes, parts.attention(sizes, bias=bias), feeding)
    return parts.decoder(sizes, layers, output_bias=bias)


def _experts(config: Mapping[str, Any], sizes: Sizes, bias: bool) -> MoE:
    """`bias`: of the shared experts; the others have none."""
    count, used, inner = (int(config[name]) for name in ("moe_num_experts", "moe_k", "moe_intermediate_size"))
    check_experts(used, count)
    made = parts.mixture(sizes, count, inner, Routing(used, renormalize=True, bias=True))
    correction = Tensors({"moe_statics.e_score_correction_bias": (1, count)})
    shared = inner * int(config["moe_num_shared_experts"] or 0)
    every = parts.mlp(sizes, bias, inner=shared, name="shared_experts") if shared else None
    return replace(made, choice_bias=correction, shared=every)


ARCHITECTURE = Architecture(
    name="Ernie4_5_MoeForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    model_type="ernie4_5_moe",
    weights=(PermuteRotary(rotated_dims),),
    names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)
