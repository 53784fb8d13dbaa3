"""Small random models with sparse attention in transformers, whose indexers choose fewer keys than prompts have."""

from __future__ import annotations

from typing import Any

import torch
from deepseek_small import EXPERTS, LATENT, YARN
from models_small import SIZES, randomized
from transformers import AutoModelForCausalLM, AXK2Config, DeepseekV32Config, GlmMoeDsaConfig, HYV4Config

# Of few heads, all are often 0 for several keys, whose scores are then equal. So are those of a token whose embedding
# is 0, as that of padding.
INDEX = {"index_n_heads": 24, "index_head_dim": 24, "index_topk": 9, "pad_token_id": None}
COMMON = {**SIZES, **LATENT, **EXPERTS, **INDEX, "num_key_value_heads": 6, "q_lora_rank": 24}
GROUPS = {"n_group": 4, "topk_group": 2}
MODELS: dict[str, Any] = {
    "v32": lambda **fields: DeepseekV32Config(**{**COMMON, **GROUPS, "rope_parameters": YARN, **fields}),
    "v32-dense": lambda **fields: DeepseekV32Config(**{**COMMON, "first_k_dense_replace": 3, **fields}),
    "glm": lambda **fields: GlmMoeDsaConfig(**{**COMMON, "indexer_types": ["full", "shared", "full"], **fields}),
    "glm-shared": lambda **fields: GlmMoeDsaConfig(
        **{**COMMON, "index_topk_freq": 4, "index_skip_topk_offset": 1, **fields}
    ),
    "axk2": lambda **fields: AXK2Config(**{**COMMON, "gated_norm_rank": 6, "rope_parameters": YARN, **fields}),
    "axk2-sparse": lambda **fields: AXK2Config(
        **{**COMMON, "attention_bias": True, "first_k_dense_replace": 0, "moe_layer_freq": 2, **fields}
    ),
    "hy": lambda **fields: HYV4Config(**{**COMMON, "indexer_types": ["full", "shared", "full"], **fields}),
    "hy-yarn": lambda **fields: HYV4Config(**{**COMMON, "hc_mult": 3, "rope_parameters": YARN, **fields}),
}


def small(kind: str, **fields: Any) -> Any:
    """A random model whose choice of experts also depends on the correction bias. `fields`: of its configuration."""
    torch.manual_seed(0)
    config = MODELS[kind](**fields)
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    return model
