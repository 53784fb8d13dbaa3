"""ERNIE 4.5 with experts. Its sizes alone are known. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, experts, sizes


def ernie4_5_moe(c: Mapping[str, Any]) -> Part:
    bias, count, inner = bool(c["use_bias"]), c["moe_num_experts"], c["moe_intermediate_size"]
    last = c["num_hidden_layers"] - 1 if c["moe_layer_end_index"] == -1 else c["moe_layer_end_index"]
    first, step, shared = c["moe_layer_start_index"], c["moe_layer_interval"], c["moe_num_shared_experts"] * inner
    base = sizes(c)
    sparse, dense = experts(base, count, inner, c["moe_k"], correction=True), parts.mlp(base, bias)
    if shared:
        sparse = dataclasses.replace(sparse, shared=parts.mlp(base, bias, inner=shared, name="shared_experts"))
    is_sparse = [(index + 1) % step == 0 and first <= index <= last for index in range(base.layers)]
    mixer, feeding = parts.attention(base, bias=bias), [sparse if each else dense for each in is_sparse]
    return parts.decoder(base, parts.pre_norm_layers(base, mixer, feeding), output_bias=bias)


ARCHITECTURE = Architecture(
    name="Ernie4_5_MoeForCausalLM",
    tree=ernie4_5_moe,
    defaults=common(
        103424,
        2560,
        12288,
        28,
        20,
        4,
        131072,
        tie_word_embeddings=True,
        use_bias=False,
        moe_intermediate_size=1536,
        moe_k=6,
        moe_num_experts=64,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
    ),
    layers=None,
    model_type="ernie4_5_moe",
    names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)
