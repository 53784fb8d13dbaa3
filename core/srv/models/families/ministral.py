"""Ministral: Mistral with windows by kind of layer. Ministral 3: its queries grow with their position.

Torch-free. The factor of queries is that of Llama 4; it is 1 up to the context length of pre-training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, Temperature, alike
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes, one_window, windows_of_types, with_default_rope
from srv.models.families.mistral import MISTRAL_DEFAULTS
from srv.models.layers.rope_config import rope_parameters
from srv.models.unsupported import UnsupportedConfig

BETA = "llama_4_scaling_beta"
# What transformers fills in for a configuration without RoPE parameters.
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}


def ministral(config: Mapping[str, Any]) -> Part:
    sizes, window = decoder_sizes(config), one_window(config)
    types = config.get("layer_types") or ["full_attention" if window is None else "sliding_attention"] * sizes.layers
    if window is None and "sliding_attention" in types:
        raise UnsupportedConfig("layer_types with sliding_attention without a sliding_window is not implemented")

    def attention(window: int | None) -> Attention:
        return parts.attention(sizes, window=window)

    mixers = alike(windows_of_types(types, sizes.layers, window or 0), attention)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, mixers, parts.mlp(sizes)))


def ministral3(config: Mapping[str, Any]) -> Part:
    config = with_default_rope(config, ROPE)
    sizes = decoder_sizes(config)
    attention = parts.attention(sizes, window=one_window(config), temperature=_temperature(config))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes)))


def _temperature(config: Mapping[str, Any]) -> Temperature | None:
    parameters = rope_parameters(config)
    if not parameters.get(BETA):
        return None
    step = parameters.get("original_max_position_embeddings")
    if not step:
        raise UnsupportedConfig(f"{BETA} without original_max_position_embeddings is not implemented natively")
    return Temperature(float(step), float(parameters[BETA]), first=0)


MINISTRAL = Architecture(
    name="MinistralForCausalLM",
    tree=ministral,
    defaults=MISTRAL_DEFAULTS,
)
MINISTRAL3 = Architecture(
    name="Ministral3ForCausalLM",
    tree=ministral3,
    defaults={
        **MISTRAL_DEFAULTS,
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
)
