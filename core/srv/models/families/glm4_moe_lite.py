"""GLM-4.7-Flash: latent attention and experts. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import (
    ROUTED,
    common,
    deepseek_experts,
    either,
    latent,
    sizes,
    sparse_from,
)


def glm4_moe_lite(c: Mapping[str, Any]) -> Part:
    base = sizes(c)
    feeding = either(base, deepseek_experts(c, base), sparse_from(c, 1))
    return parts.decoder(base, parts.pre_norm_layers(base, latent(c, base), feeding))


ARCHITECTURE = Architecture(
    name="Glm4MoeLiteForCausalLM",
    tree=glm4_moe_lite,
    defaults=common(
        154880,
        2048,
        10240,
        47,
        20,
        20,
        202752,
        kv_lora_rank=512,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        moe_intermediate_size=1536,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
    ),
    layers=None,
    model_type="glm4_moe_lite",
    names={"head_dim": "qk_rope_head_dim", **ROUTED},
)
