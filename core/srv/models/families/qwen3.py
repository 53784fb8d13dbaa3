"""Qwen3: RMS norm over query and key heads; otherwise Qwen2 with optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.checkpoints.gguf_layout import HEAD_NORM_NAMES, GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.qwen2 import QWEN_DEFAULTS, windows


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config), bool(config["attention_bias"])
    norms = parts.head_norms(sizes)

    def attention(window: int | None) -> Attention:
        return parts.attention(sizes, bias=bias, norms=norms, window=window)

    attentions = alike(windows(config), attention)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attentions, parts.mlp(sizes)))


ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM",
    tree=tree,
    defaults={**QWEN_DEFAULTS, "head_dim": 128},
    gguf=GGUFLayout("qwen3", weights=(HEAD_NORM_NAMES,)),
)
