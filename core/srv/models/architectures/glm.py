"""GLM-4 of 2024 (GlmForCausalLM): Llama with half of each head rotated, in adjacent pairs, and a fused MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DEFAULTS, DecoderConfig, decoder_config
from srv.models.checkpoints.rules import GATE_UP, PermuteRotary, Split
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


def make_config(config: Mapping[str, Any]) -> DecoderConfig:
    base = decoder_config(config, reads=("partial_rotary_factor",))
    return base.replace(qkv_bias=bool(config["attention_bias"]))


def rotated_dims(config: Mapping[str, Any]) -> int:
    """The number of dimensions per head that are rotated."""
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return rope_config(config, head_dim).rotary_dim


ARCHITECTURE = Architecture(
    name="GlmForCausalLM",
    make_config=make_config,
    defaults=GLM_DEFAULTS,
    weights=(Split("mlp.gate_up_proj", GATE_UP), PermuteRotary(rotated_dims)),
)
