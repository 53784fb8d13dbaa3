"""Llama: Llama 2 and 3, SmolLM2 and the many models that are stored as Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DEFAULTS, DecoderConfig, decoder_config
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary

LLAMA_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def make_config(config: Mapping[str, Any]) -> DecoderConfig:
    bias = bool(config["attention_bias"])
    return decoder_config(config).replace(qkv_bias=bias, output_bias=bias, mlp_bias=bool(config["mlp_bias"]))


ARCHITECTURE = Architecture(
    name="LlamaForCausalLM",
    make_config=make_config,
    defaults=LLAMA_DEFAULTS,
    gguf=GGUFLayout("llama", weights=(PermuteRotary(),)),
)
