"""GLM-4 of 2024 (GlmForCausalLM): Llama with half of each head rotated, in adjacent pairs, and a fused MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part
from srv.models.checkpoints.gguf_layout import FUSED_MLP, GGUFLayout
from srv.models.checkpoints.rules import GATE_UP, PermuteRotary, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes
from srv.models.layers.rope_config import rope_config

GLM_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}


def tree(config: Mapping[str, Any]) -> Part:
    sizes, attention = sizes_and_attention(config)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes)))


def sizes_and_attention(config: Mapping[str, Any]) -> tuple[Sizes, Attention]:
    sizes = decoder_sizes(config, reads=("partial_rotary_factor",))
    return sizes, parts.attention(sizes, bias=bool(config["attention_bias"]), output_bias=False)


def rotated_dims(config: Mapping[str, Any]) -> int:
    """The number of dimensions per head that are rotated."""
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return rope_config(config, head_dim).rotary_dim


ARCHITECTURE = Architecture(
    name="GlmForCausalLM",
    tree=tree,
    defaults=GLM_DEFAULTS,
    gguf=GGUFLayout("chatglm", weights=(FUSED_MLP, PermuteRotary(rotated_dims))),
    weights=(Split("mlp.gate_up_proj", GATE_UP), PermuteRotary(rotated_dims)),
)
