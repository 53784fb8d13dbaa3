"""Mixtral: Mistral with eight experts in every layer, of which each token uses two. llama.cpp stores it as Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import EXPERT_COUNT, EXPERT_FIELDS, GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary, Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes, one_window
from srv.models.families.mistral import MISTRAL_DEFAULTS
from srv.models.layers.moe_config import Routing


def tree(config: Mapping[str, Any]) -> Part:
    sizes, window = decoder_sizes(config, reads=("num_local_experts",)), one_window(config)
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=True)
    attention = parts.attention(sizes, window=window)
    experts = parts.mixture(sizes, int(config["num_local_experts"]), sizes.intermediate_size, routing)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, experts))


ARCHITECTURE = Architecture(
    name="MixtralForCausalLM",
    tree=tree,
    defaults={
        **MISTRAL_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    gguf=GGUFLayout(
        "llama",
        weights=(PermuteRotary(),),
        fields={**EXPERT_FIELDS, EXPERT_COUNT: "num_local_experts"},
    ),
    weights=(Rename(parts={"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}),),
)
