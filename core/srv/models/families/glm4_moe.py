"""GLM-4.5 and 4.6: experts with a sigmoid router and a shared expert, after a few layers without; partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import MoE, Part
from srv.models.checkpoints.gguf_layout import (
    EXPERT_COUNT,
    EXPERT_FIELDS,
    HEAD_NORM_NAMES,
    ROUTING_FIELDS,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    GGUFLayout,
    layer_names,
)
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes
from srv.models.families.builders.layer_types import grouped_routing
from srv.models.layers.moe_config import COUNT_FIELDS


def tree(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(config, reads=("partial_rotary_factor", *COUNT_FIELDS))
    first, norms = int(config["first_k_dense_replace"]), parts.head_norms(sizes) if config["use_qk_norm"] else None
    attention = parts.attention(sizes, bias=bool(config["attention_bias"]), output_bias=False, norms=norms)
    sparse, dense = _experts(config, sizes), parts.mlp(sizes)
    feeding = [sparse if index >= first else dense for index in range(sizes.layers)]
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, feeding))


def _experts(config: Mapping[str, Any], sizes: Sizes) -> MoE:
    inner = int(config["moe_intermediate_size"])
    shared, count = inner * int(config["n_shared_experts"]), int(config["n_routed_experts"])
    routing = grouped_routing(config, count)
    return parts.mixture(sizes, count, inner, routing, shared=shared, shared_name="shared_experts")


ARCHITECTURE = Architecture(
    name="Glm4MoeForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    gguf=GGUFLayout(
        "glm4moe",
        weights=(
            HEAD_NORM_NAMES,
            SHARED_EXPERTS,
            layer_names({"post_attention_norm": "post_attention_layernorm"}),
        ),
        fields={
            **EXPERT_FIELDS,
            EXPERT_COUNT: "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        optional_fields=ROUTING_FIELDS,
        implied=SIGMOID_ROUTER,
        present={"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    model_type="glm4_moe",
)
