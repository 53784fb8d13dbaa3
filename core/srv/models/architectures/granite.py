"""Granite 3: Llama with four constants, which multiply embeddings, attention scores and residuals and divide logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import DecoderConfig, decoder_config
from srv.models.architectures.llama import LLAMA_DEFAULTS
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary

# The constants, by the names of GGUF metadata. There, too, "logit_scale" divides.
CONSTANTS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def make_config(config: Mapping[str, Any]) -> DecoderConfig:
    base, bias = decoder_config(config, reads=CONSTANTS.values()), bool(config["attention_bias"])
    return base.replace(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config["mlp_bias"]),
        embedding_multiplier=float(config["embedding_multiplier"]),
        attention_scale=float(config["attention_multiplier"]),
        residual_multiplier=float(config["residual_multiplier"]),
        logits_divisor=float(config["logits_scaling"]),
    )


ARCHITECTURE = Architecture(
    name="GraniteForCausalLM",
    make_config=make_config,
    defaults={**LLAMA_DEFAULTS, **dict.fromkeys(CONSTANTS.values(), 1.0)},
    gguf=GGUFLayout("granite", weights=(PermuteRotary(),), fields=CONSTANTS),
)
