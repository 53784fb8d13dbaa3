"""Gemma: Llama with a GELU gate. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, sizes, uniform


def gemma(c: Mapping[str, Any]) -> Part:
    base = sizes(c)
    return uniform(
        base, parts.attention(base, bias=bool(c["attention_bias"])), parts.mlp(base, activation="gelu_tanh_gated")
    )


ARCHITECTURE = Architecture(
    name="GemmaForCausalLM",
    tree=gemma,
    defaults=common(256000, 3072, 24576, 28, 16, 16, 8192, head_dim=256, tie_word_embeddings=True),
    layers=None,
    model_type="gemma",
)
