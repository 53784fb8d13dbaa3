"""Mixtral: Mistral with eight experts in every layer, of which each token uses two. llama.cpp stores it as Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DecoderConfig, decoder_config
from srv.models.architectures.mistral import MISTRAL_DEFAULTS
from srv.models.checkpoints.gguf_layout import EXPERT_COUNT, EXPERT_FIELDS, GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary, Rename
from srv.models.layers.moe_config import MoEConfig, Routing


def make_config(config: Mapping[str, Any]) -> DecoderConfig:
    base, window = decoder_config(config, reads=("num_local_experts",)), config["sliding_window"]
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=True)
    return base.replace(
        windows=(None if window is None else int(window),) * base.layers,
        moe=MoEConfig(int(config["num_local_experts"]), base.intermediate_size, routing),
        moe_layers=(True,) * base.layers,
    )


ARCHITECTURE = Architecture(
    name="MixtralForCausalLM",
    make_config=make_config,
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
