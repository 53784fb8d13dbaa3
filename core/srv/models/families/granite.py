"""Granite 3: Llama with four constants, which multiply embeddings, attention scores and residuals and divide logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.llama import LLAMA_DEFAULTS

# The constants, by the names of GGUF metadata. There, too, "logit_scale" divides.
CONSTANTS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config, reads=CONSTANTS.values()), bool(config["attention_bias"])
    scale, factor = float(config["attention_multiplier"]), float(config["residual_multiplier"])
    attention = parts.attention(sizes, bias=bias, scale=scale)
    return parts.decoder(
        sizes,
        parts.pre_norm_layers(sizes, attention, parts.mlp(sizes, bool(config["mlp_bias"])), factor=factor),
        factor=float(config["embedding_multiplier"]),
        logits_divisor=float(config["logits_scaling"]),
    )


ARCHITECTURE = Architecture(
    name="GraniteForCausalLM",
    tree=tree,
    defaults={**LLAMA_DEFAULTS, **dict.fromkeys(CONSTANTS.values(), 1.0)},
    gguf=GGUFLayout("granite", weights=(PermuteRotary(),), fields=CONSTANTS),
)
