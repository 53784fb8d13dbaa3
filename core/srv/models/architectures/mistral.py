"""Mistral: a sliding window in all layers, or in none. llama.cpp stores these models as Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DEFAULTS, DecoderConfig, decoder_config, one_window

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


def make_config(config: Mapping[str, Any]) -> DecoderConfig:
    base = decoder_config(config)
    return base.replace(windows=one_window(config, base.layers))


ARCHITECTURE = Architecture(
    name="MistralForCausalLM",
    make_config=make_config,
    defaults=MISTRAL_DEFAULTS,
)
