"""Phi-3.5-MoE: layer norms and experts. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, experts, normed, sizes


def phimoe(c: Mapping[str, Any]) -> Part:
    base, count, used = sizes(c), c["num_local_experts"], c["num_experts_per_tok"]
    feeding = experts(base, count, c["intermediate_size"], used, name="block_sparse_moe")
    mixer = parts.attention(base, window=c["sliding_window"], bias=bool(c["attention_bias"]))
    return normed(base, mixer, feeding, output_bias=bool(c["lm_head_bias"]))


ARCHITECTURE = Architecture(
    name="PhiMoEForCausalLM",
    tree=phimoe,
    defaults=common(
        32064,
        4096,
        6400,
        32,
        32,
        8,
        131072,
        num_local_experts=16,
        num_experts_per_tok=2,
        lm_head_bias=False,
        sliding_window=None,
    ),
    layers=None,
    model_type="phimoe",
    published_names=("PhimoeForCausalLM",),
)
