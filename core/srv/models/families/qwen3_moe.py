"""Qwen3-MoE: Qwen3 with experts, and without a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import EXPERT_FIELDS, HEAD_NORM_NAMES, GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.qwen2_moe import MOE_DEFAULTS, experts, sparse_layers
from srv.models.layers.moe_config import COUNT_FIELDS


def tree(config: Mapping[str, Any]) -> Part:
    sizes, window = decoder_sizes(config, reads=COUNT_FIELDS), config["sliding_window"]
    bias, windowed = bool(config["attention_bias"]), window is not None and config["use_sliding_window"]
    norms, only = parts.head_norms(sizes), int(window) if windowed else None
    attention = parts.attention(sizes, bias=bias, norms=norms, window=only)
    sparse, dense = experts(config, sizes), parts.mlp(sizes)
    feeding = [sparse if each else dense for each in sparse_layers(config, sizes.layers)]
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, feeding))


ARCHITECTURE = Architecture(
    name="Qwen3MoeForCausalLM",
    tree=tree,
    defaults={
        **MOE_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    model_type="qwen3_moe",
    gguf=GGUFLayout(
        "qwen3moe",
        weights=(HEAD_NORM_NAMES,),
        fields={**EXPERT_FIELDS, "expert_feed_forward_length": "moe_intermediate_size"},
        complete=lambda config: {**config, "norm_topk_prob": True},  # as llama.cpp assumes
    ),
)
