"""Small random models of DeepSeek-V2, V3 and MiniCPM 3 in transformers, of sizes that the native kernels take."""

from __future__ import annotations

from typing import Any

import torch
from models_small import SIZES, randomized
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, MiniCPM3Config

LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 10}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + index / 8 for index in range(8)],
    "long_factor": [2.0] * 8,
}
COMMON = {**SIZES, **LATENT, **EXPERTS, "num_key_value_heads": 6, "pad_token_id": 0}
DENSE = {name: value for name, value in COMMON.items() if name not in EXPERTS}
MODELS: dict[str, Any] = {
    "v2-lite": lambda: DeepseekV2Config(**COMMON, q_lora_rank=None, rope_parameters=YARN, topk_method="greedy"),
    "v2": lambda: DeepseekV2Config(**COMMON, **GROUPS, q_lora_rank=24, topk_method="group_limited_greedy"),
    "v3": lambda: DeepseekV3Config(**COMMON, **GROUPS, q_lora_rank=24, rope_parameters=YARN, attention_bias=True),
    "minicpm3": lambda: MiniCPM3Config(
        **DENSE, q_lora_rank=24, scale_emb=3, scale_depth=1.1, dim_model_base=64, attention_bias=True, mlp_bias=True
    ),
    "minicpm3-yarn": lambda: MiniCPM3Config(
        **{**DENSE, "tie_word_embeddings": False}, q_lora_rank=None, scale_depth=None, rope_parameters=YARN
    ),
    "minicpm3-long": lambda: MiniCPM3Config(
        **{**DENSE, "max_position_embeddings": 64}, q_lora_rank=24, rope_parameters=LONG_ROPE, dim_model_base=None
    ),
    "v3-plain": lambda: DeepseekV3Config(**COMMON, n_group=1, topk_group=1, q_lora_rank=None, norm_topk_prob=False),
    "glm-lite": lambda: Glm4MoeLiteConfig(**COMMON, q_lora_rank=24),
    "glm-lite-groups": lambda: Glm4MoeLiteConfig(
        **COMMON, **GROUPS, q_lora_rank=None, mlp_layer_types=["sparse", "dense", "sparse"], attention_bias=True
    ),
}


def small(kind: str, **fields: Any) -> Any:
    """A random model whose choice of experts also depends on the correction bias. `fields`: of its configuration."""
    torch.manual_seed(0)
    config = MODELS[kind]()
    for name, value in fields.items():
        setattr(config, name, value)
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    return model
