"""dots.llm1: norms of heads, and experts from some layer on. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import (
    ROUTED,
    SLIDING,
    attention_of_layers,
    common,
    deepseek_experts,
    either,
    sizes,
    sparse_from,
    windows,
)


def dots1(c: Mapping[str, Any]) -> Part:
    window, last, base = c["sliding_window"], c["max_window_layers"], sizes(c)
    slides = windows(c, lambda index: SLIDING if window and index >= last else "full_attention")
    mixers = attention_of_layers(base, slides, norms=parts.head_norms(base), bias=bool(c["attention_bias"]))
    sparse = sparse_from(c, c["first_k_dense_replace"])
    feeding = either(base, deepseek_experts(c, base), sparse) if any(sparse) else parts.mlp(base)
    return parts.decoder(base, parts.pre_norm_layers(base, mixers, feeding))


ARCHITECTURE = Architecture(
    name="Dots1ForCausalLM",
    tree=dots1,
    defaults=common(
        152064,
        4608,
        10944,
        62,
        32,
        32,
        2048,
        moe_intermediate_size=1408,
        n_routed_experts=None,
        n_shared_experts=None,
        num_experts_per_tok=None,
        first_k_dense_replace=0,
        sliding_window=4096,
        max_window_layers=62,
    ),
    layers=None,
    model_type="dots1",
    names=ROUTED,
)
