"""GLM-4-0414: GLM-4 with norms after attention and MLP as well. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import FUSED_MLP, OUTPUT_NORM_NAMES, GGUFLayout
from srv.models.checkpoints.rules import GATE_UP, PermuteRotary, Rename, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.sandwich import sandwich_decoder
from srv.models.families.glm import GLM_DEFAULTS, rotated_dims, sizes_and_attention


def tree(config: Mapping[str, Any]) -> Part:
    sizes, attention = sizes_and_attention(config)
    return sandwich_decoder(sizes, attention, parts.mlp(sizes))


ARCHITECTURE = Architecture(
    name="Glm4ForCausalLM",
    tree=tree,
    defaults=GLM_DEFAULTS,
    gguf=GGUFLayout("glm4", weights=(OUTPUT_NORM_NAMES, FUSED_MLP, PermuteRotary(rotated_dims))),
    weights=(
        Rename(
            {
                "model.layers.*.post_self_attn_layernorm": "model.layers.*.post_attention_layernorm",
                "model.layers.*.post_attention_layernorm": "model.layers.*.pre_feedforward_layernorm",
                "model.layers.*.post_mlp_layernorm": "model.layers.*.post_feedforward_layernorm",
            }
        ),
        Split("mlp.gate_up_proj", GATE_UP),
        PermuteRotary(rotated_dims),
    ),
)
