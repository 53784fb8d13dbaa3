"""Granite 3 with experts, and optionally a shared MLP beside them; the constants are those of Granite 3. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.builders.layer_types import check_experts
from srv.models.families.granite import CONSTANTS
from srv.models.families.granite_hybrid import SHARED_EXPERT, WEIGHTS
from srv.models.families.llama import LLAMA_DEFAULTS
from srv.models.layers.moe_config import COUNT_FIELDS, Routing


def tree(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(config, reads=(*COUNT_FIELDS, *CONSTANTS.values()))
    count, used = int(config["num_local_experts"]), int(config["num_experts_per_tok"])
    check_experts(used, count)
    routing, shared = Routing(used, renormalize=True), int(config.get("shared_intermediate_size") or 0)
    attention = parts.attention(sizes, bias=bool(config["attention_bias"]), scale=float(config["attention_multiplier"]))
    experts = parts.mixture(sizes, count, sizes.intermediate_size, routing, shared=shared, shared_name=SHARED_EXPERT)
    return parts.decoder(
        sizes,
        parts.pre_norm_layers(sizes, attention, experts, factor=float(config["residual_multiplier"])),
        factor=float(config["embedding_multiplier"]),
        logits_divisor=float(config["logits_scaling"]),
    )


_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    **dict.fromkeys(CONSTANTS.values(), 1.0),
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GRANITE = Architecture(
    name="GraniteMoeForCausalLM", tree=tree, defaults=_DEFAULTS, model_type="granitemoe", weights=WEIGHTS
)
SHARED = Architecture(
    name="GraniteMoeSharedForCausalLM",
    tree=tree,
    defaults={**_DEFAULTS, "shared_intermediate_size": 0},
    model_type="granitemoeshared",
    weights=WEIGHTS,
)
