"""Llama: Llama 2 and 3, SmolLM2 and the many models that are stored as Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes

LLAMA_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config), bool(config["attention_bias"])
    attention = parts.attention(sizes, bias=bias)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes, bool(config["mlp_bias"]))))


ARCHITECTURE = Architecture(
    name="LlamaForCausalLM",
    tree=tree,
    defaults=LLAMA_DEFAULTS,
    gguf=GGUFLayout("llama", weights=(PermuteRotary(),)),
)
