"""A small random model of every class with native layers, as a bfloat16 checkpoint for tests of whole platforms.

Heads have 64 or 128 elements, as kernels for accelerators require. Sliding windows and chunks are shorter than prompts.
In mixtures, each token's embedding says which experts it uses, wherever the router allows that (`model_cells.decided`).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from deepseek_small import EXPERTS, GROUPS, YARN
from model_cells import Combined, decided, random_model, root_mean_square, rounded
from models_small import GRANITE

COUNT = 8  # experts
PAD = {"pad_token_id": 0}
# For classes whose configuration does not say how large heads are.
HEADS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
MIXED = {"head_dim": 64, "num_experts": COUNT, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**MIXED, "shared_expert_intermediate_size": 32}
DELTA = {
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
LATENT = {
    **EXPERTS,
    **GROUPS,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
    **PAD,
}
GEMMA = {**PAD, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 6}
GEMMA3N = {
    **PAD,
    "head_dim": 64,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 90,
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0],
    "altup_num_inputs": 3,
    "laurel_rank": 4,
}
GEMMA4 = {
    **PAD,
    "head_dim": 64,
    "global_head_dim": 128,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
}
LLAMA4 = {
    **PAD,
    "head_dim": 128,
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "attn_scale": 0.6,
}
MINIMAX_M2 = {**PAD, "head_dim": 64, "rotary_dim": 32, "num_local_experts": COUNT, "num_experts_per_tok": 2}
NTK = {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0}
MINISTRAL3 = {  # longer than the context of pre-training, so that queries grow
    **PAD,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 16.0,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    },
}
ROUTED = {**EXPERTS, **PAD, "moe_intermediate_size": 32}
ERNIE_MOE = {**PAD, **HEADS, "moe_num_experts": COUNT, "moe_k": 3, "moe_intermediate_size": 32}
GRANITE_MOE = {**GRANITE, **PAD, **HEADS, "num_local_experts": COUNT, "num_experts_per_tok": 3}
EXAONE_MOE = {**PAD, "head_dim": 64, "num_experts": COUNT, "moe_intermediate_size": 32, "sliding_window": 9}
HUNYUAN_MOE = {**PAD, "head_dim": 64, "num_experts": COUNT, "moe_topk": 3}
BAILING = {"head_dim": 64, "moe_intermediate_size": 32}
AFMOE = {**PAD, **MIXED, "sliding_window": 9, "global_attn_every_n_layers": 2, "mup_enabled": True}
DBRX = {
    **PAD,
    **HEADS,
    "attn_config": {"kv_n_heads": 1, "clip_qkv": 2.0},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": COUNT, "moe_top_k": 3},
}
MIMO = {
    **PAD,
    "head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": COUNT,
    "sliding_window": 9,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
        for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
    },
}
JAMBA = {
    **HEADS,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "num_experts": COUNT,
    "mamba_dt_rank": 8,
    "mamba_d_state": 16,
}
NEMOTRON_H = {
    **HEADS,
    "hybrid_override_pattern": "M*-EME",
    "mamba_num_heads": 32,
    "n_routed_experts": COUNT,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
COHERE = {**PAD, **HEADS, "logit_scale": 0.3}


@dataclass(frozen=True)
class Model:
    """A model type of transformers or of `reference_models`, fields of its configuration, and how errors of its tokens
    are compared.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    experts: int = 0
    of: Combined = root_mean_square

    def made(self) -> Any:
        """In float32, with the values of a bfloat16 checkpoint."""
        if self.experts:
            return decided(self.kind, self.experts, **self.fields)
        return rounded(random_model(self.kind, **self.fields))


DENSE = {
    "LlamaForCausalLM": Model("llama", {"head_dim": 64}),
    "MistralForCausalLM": Model("mistral", {"head_dim": 128, "sliding_window": 9}),
    "Qwen2ForCausalLM": Model("qwen2", HEADS),
    "Qwen3ForCausalLM": Model("qwen3", {"head_dim": 128}),
    "GraniteForCausalLM": Model("granite", {**GRANITE, **HEADS}),
    "SmolLM3ForCausalLM": Model("smollm3", {**HEADS, "no_rope_layer_interval": 2}),
    "Gemma2ForCausalLM": Model("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "Gemma3ForCausalLM": Model("gemma3", {**GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "Gemma3nForCausalLM": Model("gemma3n_text", GEMMA3N),
    "Gemma4ForCausalLM": Model(
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
    ),
    "Gemma4UnifiedForCausalLM": Model("gemma4_unified_text", GEMMA4),
    "Olmo2ForCausalLM": Model("olmo2", {**PAD, **HEADS}),
    "Phi3ForCausalLM": Model("phi3", {**PAD, **HEADS, "sliding_window": 9}),
    "GlmForCausalLM": Model("glm", {**PAD, "head_dim": 64, "attention_bias": True}),
    "Glm4ForCausalLM": Model("glm4", {**PAD, "head_dim": 128, "attention_bias": True}),
    "Ernie4_5ForCausalLM": Model("ernie4_5", {**PAD, "head_dim": 64}),
    "Ministral3ForCausalLM": Model("ministral3", MINISTRAL3),
    "MinistralForCausalLM": Model("ministral", {**PAD, "head_dim": 64, "sliding_window": 9}),
    "SeedOssForCausalLM": Model("seed_oss", {**PAD, "head_dim": 64}),
    "Olmo3ForCausalLM": Model("olmo3", {**PAD, **HEADS, "num_hidden_layers": 4, "sliding_window": 9}),
    "ArceeForCausalLM": Model("arcee", {**PAD, **HEADS}),
    "GemmaForCausalLM": Model("gemma", {**PAD, "head_dim": 64}),
    "Exaone4ForCausalLM": Model("exaone4", {**PAD, "head_dim": 64, "num_hidden_layers": 4, "sliding_window": 9}),
    "HunYuanDenseV1ForCausalLM": Model("hunyuan_v1_dense", {**PAD, "head_dim": 64, "rope_parameters": NTK}),
    "ApertusForCausalLM": Model("apertus", {**PAD, **HEADS}),
    "OlmoForCausalLM": Model("olmo", {**PAD, **HEADS, "clip_qkv": 2.0}),
}
LAYER_NORM = {
    "StableLmForCausalLM": Model("stablelm", {**HEADS, "use_parallel_residual": True}),
    "GPTJForCausalLM": Model("gptj", {**HEADS, "rotary_dim": 32}),
    "FalconForCausalLM": Model("falcon", {**HEADS, "new_decoder_architecture": True, "num_kv_heads": 1}),
    "BloomForCausalLM": Model("bloom", HEADS),
    "MptForCausalLM": Model("mpt", HEADS),
    "XGLMForCausalLM": Model("xglm", {**HEADS, "ffn_dim": 80, "init_std": 0.1}),
    "CohereForCausalLM": Model("cohere", COHERE),
    "Cohere2ForCausalLM": Model("cohere2", {**COHERE, "sliding_window": 5, "sliding_window_pattern": 2}),
    "Starcoder2ForCausalLM": Model("starcoder2", {**HEADS, "sliding_window": 9}),
    "PhiForCausalLM": Model("phi", {**HEADS, "hidden_act": "gelu_new"}),
    "GPTNeoXForCausalLM": Model("gpt_neox", {**HEADS, "hidden_act": "gelu"}),
    "OPTForCausalLM": Model("opt", {**HEADS, "ffn_dim": 80, "word_embed_proj_dim": 128, "init_std": 0.1}),
    "GPT2LMHeadModel": Model("gpt2", HEADS),
    "NemotronForCausalLM": Model("nemotron", {**HEADS, "hidden_size": 64}),
    "Jais2ForCausalLM": Model("jais2", HEADS),
    "PersimmonForCausalLM": Model("persimmon", HEADS),
}
MIXTURES = {
    "MixtralForCausalLM": Model("mixtral", {"head_dim": 128, "num_local_experts": COUNT}, COUNT),
    "Qwen2MoeForCausalLM": Model("qwen2_moe", {**SHARED, **HEADS, "num_experts_per_tok": 3}, COUNT),
    "Qwen3MoeForCausalLM": Model("qwen3_moe", {**MIXED, "norm_topk_prob": True}, COUNT),
    "Glm4MoeForCausalLM": Model("glm4_moe", {**EXPERTS, **PAD, "moe_intermediate_size": 32, "head_dim": 64}, COUNT),
    "Glm4MoeLiteForCausalLM": Model("glm4_moe_lite", LATENT, COUNT),
    "Ernie4_5_MoeForCausalLM": Model("ernie4_5_moe", ERNIE_MOE, COUNT),
    "Dots1ForCausalLM": Model("dots1", {**ROUTED, "head_dim": 64}, COUNT),
    "GraniteMoeForCausalLM": Model("granitemoe", GRANITE_MOE, COUNT),
    "GraniteMoeSharedForCausalLM": Model("granitemoeshared", {**GRANITE_MOE, "shared_intermediate_size": 32}, COUNT),
    "ExaoneMoeForCausalLM": Model("exaone_moe", {**EXAONE_MOE, "sliding_window_pattern": 2}, COUNT),
    "HunYuanMoEV1ForCausalLM": Model("hunyuan_v1_moe", HUNYUAN_MOE, COUNT),
    "PhiMoEForCausalLM": Model("phimoe", {**PAD, **HEADS, "num_local_experts": COUNT, "lm_head_bias": True}),
    "AfmoeForCausalLM": Model("afmoe", AFMOE),
    "DbrxForCausalLM": Model("dbrx", DBRX),
    "MiMoV2FlashForCausalLM": Model("mimo_v2_flash", {**MIMO, "moe_intermediate_size": 32}, COUNT),
    "BailingMoeForCausalLM": Model("bailing_moe", BAILING, COUNT),
    "BailingMoeV2ForCausalLM": Model("bailing_moe_v2", BAILING, COUNT),
    "XverseForCausalLM": Model("xverse", {**HEADS, "intermediate_size": 32}),
    "OlmoeForCausalLM": Model("olmoe", {**PAD, **HEADS, "num_experts": COUNT, "clip_qkv": 2.0}, COUNT),
    "MiniMaxM2ForCausalLM": Model("minimax_m2", MINIMAX_M2, COUNT),
    "GptOssForCausalLM": Model("gpt_oss", {**PAD, "head_dim": 64, "num_local_experts": 5, "sliding_window": 5}),
    "Llama4ForCausalLM": Model("llama4_text", LLAMA4),
    "DeepseekV2ForCausalLM": Model("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy"}, COUNT),
    "MiniCPM3ForCausalLM": Model("minicpm3", {**LATENT, "scale_depth": 1.4, "dim_model_base": 64}),
    "DeepseekV3ForCausalLM": Model("deepseek_v3", {**LATENT, "rope_parameters": YARN, "attention_bias": True}, COUNT),
}
# A few tokens of the delta rule have large errors in any rounding, and so have those whose experts it changes.
RECURRENT = {
    "Qwen3NextForCausalLM": Model("qwen3_next", {**SHARED, **DELTA}, COUNT, statistics.fmean),
    "Qwen3_5ForCausalLM": Model("qwen3_5", {"head_dim": 64, **DELTA}, of=statistics.fmean),
    "Qwen3_5MoeForCausalLM": Model("qwen3_5_moe", {**SHARED, **DELTA}, COUNT, statistics.fmean),
    "Lfm2ForCausalLM": Model("lfm2", HEADS),
    "Lfm2MoeForCausalLM": Model("lfm2_moe", {**HEADS, "moe_intermediate_size": 32}),
    "Lfm3ForCausalLM": Model("lfm3", {"head_dim": 64}),
    "RecurrentGemmaForCausalLM": Model("recurrent_gemma", {"head_dim": 64}),
    "OlmoHybridForCausalLM": Model("olmo_hybrid", HEADS, of=statistics.fmean),
    "GraniteMoeHybridForCausalLM": Model(
        "granitemoehybrid", {**GRANITE, **HEADS, "mamba_n_heads": 32}, of=statistics.fmean
    ),
    "BambaForCausalLM": Model("bamba", {**HEADS, "mamba_n_heads": 32}),
    "JambaForCausalLM": Model("jamba", JAMBA, COUNT),
    "FalconH1ForCausalLM": Model("falcon_h1", {"head_dim": 64, "mamba_n_heads": 16, "mamba_d_ssm": 128}),
    "NemotronHForCausalLM": Model("nemotron_h", NEMOTRON_H, COUNT),
    "MiniMaxForCausalLM": Model("minimax", {"head_dim": 64}, of=statistics.fmean),
}
MODELS = {**DENSE, **LAYER_NORM, **MIXTURES, **RECURRENT}
