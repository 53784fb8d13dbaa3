"""Nemotron-3, Nemotron-4, Minitron and Jais 2: layer norms, and MLPs with squared ReLU.

Nemotron's norms multiply by 1 + weight, and half of each head is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import decoder_sizes

DEFAULTS: dict[str, Any] = {"num_hidden_layers": 32, "hidden_act": "relu2", "tie_word_embeddings": False}


def nemotron(config: Mapping[str, Any]) -> Part:
    return _decoder(config, "norm_eps", wide=True)


def jais2(config: Mapping[str, Any]) -> Part:
    return _decoder(config, "layer_norm_eps", wide=False)


def _decoder(config: Mapping[str, Any], eps: str, *, wide: bool) -> Part:
    reads = ("hidden_act", "partial_rotary_factor") if wide else ("hidden_act",)
    sizes = decoder_sizes({**config, "rms_norm_eps": config[eps]}, reads=reads)
    attention = parts.attention(sizes, bias=bool(config["attention_bias"]))
    mlp = parts.mlp(sizes, bool(config["mlp_bias"]), layer_norm.activation(config, "hidden_act"))
    return layer_norm.decoder(sizes, attention, mlp, wide=wide)


NEMOTRON = Architecture(
    name="NemotronForCausalLM",
    tree=nemotron,
    defaults={
        **DEFAULTS,
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": 3,
    },
)
JAIS2 = Architecture(
    name="Jais2ForCausalLM",
    tree=jais2,
    defaults={
        **DEFAULTS,
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_attention_heads": 26,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
        "eos_token_id": 150024,
    },
)
