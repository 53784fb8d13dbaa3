"""OLMo: Llama whose norms are layer norms without weights, and optionally a bound of queries, keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Layer, Norm, Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.olmo2 import OLMO_DEFAULTS

EPS = 1e-5  # no field states it


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bound = decoder_sizes({**config, "rms_norm_eps": EPS}), config["clip_qkv"]
    attention = parts.attention(sizes, bias=bool(config["attention_bias"]))
    attention = dataclasses.replace(attention, clip=None if bound is None else float(bound))
    norm = Norm(sizes.hidden_size, sizes.norm_eps, rms=False, learned=False)
    layer = Layer((norm,), (attention,), (norm,), parts.mlp(sizes))
    return parts.decoder(sizes, (layer,) * sizes.layers, norm)


ARCHITECTURE = Architecture(
    name="OlmoForCausalLM",
    tree=tree,
    defaults={**{name: value for name, value in OLMO_DEFAULTS.items() if name != "rms_norm_eps"}, "clip_qkv": None},
)
