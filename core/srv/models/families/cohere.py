"""Cohere (Command R): parallel layers with a gated MLP, adjacent rotary pairs, and scaled logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from srv.models.blueprint import Attention, Part
from srv.models.checkpoints.gguf_layout import HEAD_NORM_NAMES, GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes
from srv.models.families.glm import rotated_dims
from srv.models.unsupported import UnsupportedConfig

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


def tree(config: Mapping[str, Any]) -> Part:
    sizes = cohere_sizes(config)
    norms = layer_norm.head_norms(sizes, joint=True) if config["use_qk_norm"] else None
    bias = bool(config["attention_bias"])
    return parallel(config, sizes, parts.attention(sizes, bias=bias, norms=norms))


def cohere_sizes(config: Mapping[str, Any]) -> Sizes:
    sizes = decoder_sizes({**config, "rms_norm_eps": config["layer_norm_eps"]}, reads=("logit_scale",))
    scale = float(config["logit_scale"])
    if not scale > 0:
        raise UnsupportedConfig(f"logit_scale = {scale} is not a positive number")
    return sizes


def parallel(config: Mapping[str, Any], sizes: Sizes, attention: Attention | Sequence[Attention]) -> Part:
    return layer_norm.decoder(
        sizes,
        attention,
        parts.mlp(sizes),
        order="parallel",
        separate_norms=False,
        norm_bias=False,
        logits_divisor=1 / float(config["logit_scale"]),
    )


GGUF_FIELDS = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}


ARCHITECTURE = Architecture(
    name="CohereForCausalLM",
    tree=tree,
    defaults={**COHERE_DEFAULTS, "rope_theta": 500000.0, "use_qk_norm": False},
    gguf=GGUFLayout(
        "command-r",
        weights=(HEAD_NORM_NAMES, *WEIGHTS),
        fields=GGUF_FIELDS,
        present={"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    weights=WEIGHTS,
)
