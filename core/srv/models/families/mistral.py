"""Mistral: a sliding window in all layers, or in none. llama.cpp stores these models as Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, one_window

MISTRAL_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}


def tree(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(config)
    attention = parts.attention(sizes, window=one_window(config))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes)))


ARCHITECTURE = Architecture(
    name="MistralForCausalLM",
    tree=tree,
    defaults=MISTRAL_DEFAULTS,
)
