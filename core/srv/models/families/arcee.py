"""Arcee: Llama whose MLP has squared ReLU in place of a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.llama import LLAMA_DEFAULTS


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config, reads=("hidden_act",)), bool(config["attention_bias"])
    mlp = parts.mlp(sizes, bool(config["mlp_bias"]), layer_norm.activation(config, "hidden_act"))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, parts.attention(sizes, bias=bias), mlp))


ARCHITECTURE = Architecture(
    name="ArceeForCausalLM",
    tree=tree,
    defaults={
        **LLAMA_DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 128001,
    },
)
