"""Granite 3 with experts, and optionally a shared MLP. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import MLP, Linear, MoE, Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, experts, sizes, uniform


def granite_moe(c: Mapping[str, Any]) -> Part:
    """With a shared MLP if the configuration has its size."""
    base, count, shared = sizes(c), c["num_local_experts"], c.get("shared_intermediate_size") or 0
    hidden, feeding = base.hidden_size, list[MLP | MoE]()
    if count:
        feeding.append(experts(base, count, base.intermediate_size, c["num_experts_per_tok"], name="block_sparse_moe"))
    if shared:
        first, last = Linear({"input_linear": 2 * shared}, hidden), Linear({"output_linear": hidden}, shared)
        feeding.append(MLP(first, last, name="shared_mlp"))
    return uniform(base, parts.attention(base, bias=bool(c["attention_bias"])), *feeding)


_GRANITE = common(32000, 4096, 11008, 32, 32, None, 2048, num_local_experts=8, num_experts_per_tok=2)
GRANITE = Architecture(
    name="GraniteMoeForCausalLM",
    tree=granite_moe,
    defaults=_GRANITE,
    layers=None,
    model_type="granitemoe",
)
SHARED = Architecture(
    name="GraniteMoeSharedForCausalLM",
    tree=granite_moe,
    defaults={**_GRANITE, "shared_intermediate_size": 0},
    layers=None,
    model_type="granitemoeshared",
)
