"""GLM-4-0414: GLM-4 with norms after attention and MLP as well. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.glm import GLM_DEFAULTS, rotated_dims
from srv.models.architectures.glm import make_config as glm_config
from srv.models.architectures.sandwich_config import SandwichConfig
from srv.models.checkpoints.rules import GATE_UP, PermuteRotary, Rename, Split


def make_config(config: Mapping[str, Any]) -> SandwichConfig:
    return SandwichConfig(glm_config(config))


ARCHITECTURE = Architecture(
    name="Glm4ForCausalLM",
    make_config=make_config,
    defaults=GLM_DEFAULTS,
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
