"""ERNIE 4.5 without experts: Llama whose rotary pairs are adjacent, with biases in all projections or in none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes
from srv.models.families.glm import rotated_dims


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config), bool(config["use_bias"])
    attention = parts.attention(sizes, bias=bias)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes, bias)))


ARCHITECTURE = Architecture(
    name="Ernie4_5ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    gguf=GGUFLayout("ernie4_5", weights=(PermuteRotary(),)),
    weights=(PermuteRotary(rotated_dims),),
)
