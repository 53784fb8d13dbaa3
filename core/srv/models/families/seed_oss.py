"""Seed-OSS: Llama with biases of queries, keys and values, and others by a field each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes


def tree(config: Mapping[str, Any]) -> Part:
    sizes, output_bias = decoder_sizes(config), bool(config["attention_out_bias"])
    attention = parts.attention(sizes, bias=bool(config["attention_bias"]), output_bias=output_bias)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes, bool(config["mlp_bias"]))))


ARCHITECTURE = Architecture(
    name="SeedOssForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 155136,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "eos_token_id": 2,
    },
    model_type="seed_oss",
)
