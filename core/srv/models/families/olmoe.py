"""OLMoE: experts in every layer, norms over all queries and all keys, and optionally a bound of both and of values.

Torch-free. (Muennighoff et al. 2024, arXiv:2409.02060)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import EXPERT_FIELDS, HEAD_NORM_NAMES, GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.olmo2 import OLMO_DEFAULTS
from srv.models.layers.moe_config import COUNT_FIELDS, Routing


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bound = decoder_sizes(config, reads=COUNT_FIELDS), config["clip_qkv"]
    attention = parts.attention(sizes, bias=bool(config["attention_bias"]), norms=parts.joint_norms(sizes))
    attention = dataclasses.replace(attention, clip=None if bound is None else float(bound))
    count = config.get("num_local_experts") or config["num_experts"]  # transformers reads the first as the second
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=bool(config["norm_topk_prob"]))
    experts = parts.mixture(sizes, int(count), sizes.intermediate_size, routing)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, experts))


ARCHITECTURE = Architecture(
    name="OlmoeForCausalLM",
    tree=tree,
    defaults={
        **OLMO_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
    gguf=GGUFLayout(
        "olmoe",
        weights=(HEAD_NORM_NAMES,),
        fields=EXPERT_FIELDS,
        optional_fields={"attention.clamp_kqv": "clip_qkv", "expert_feed_forward_length": "intermediate_size"},
    ),
)
