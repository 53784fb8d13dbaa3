"""Cohere (Command R): parallel layers with a gated MLP, adjacent rotary pairs, and scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DecoderConfig, decoder_config
from srv.models.architectures.glm import rotated_dims
from srv.models.architectures.layer_norm_config import LayerNormConfig
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.layers.rope_config import UnsupportedConfig

COHERE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "eos_token_id": 255001,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
WEIGHTS = (PermuteRotary(rotated_dims),)


def make_config(config: Mapping[str, Any]) -> LayerNormConfig:
    return parallel(decoder(config)).replace(head_norms=bool(config["use_qk_norm"]), joint_head_norms=True)


def decoder(config: Mapping[str, Any]) -> DecoderConfig:
    base = decoder_config({**config, "rms_norm_eps": config["layer_norm_eps"]}, reads=("logit_scale",))
    bias, scale = bool(config["attention_bias"]), float(config["logit_scale"])
    if not scale > 0:
        raise UnsupportedConfig(f"logit_scale = {scale} is not a positive number")
    return base.replace(qkv_bias=bias, output_bias=bias, logits_divisor=1 / scale)


def parallel(sizes: DecoderConfig) -> LayerNormConfig:
    return LayerNormConfig(sizes, mlp="silu_gated", parallel=True, separate_norms=False, norm_bias=False)


ARCHITECTURE = Architecture(
    name="CohereForCausalLM",
    make_config=make_config,
    defaults={**COHERE_DEFAULTS, "rope_theta": 500000.0, "use_qk_norm": False},
    weights=WEIGHTS,
)
