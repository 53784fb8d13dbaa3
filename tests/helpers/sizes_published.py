"""Configurations of well-known checkpoints, as far as they determine sizes; `sizes_expected` has these.

Fields that a config.json leaves out are left out here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from srv.models.families.registry import find
from srv_matrix.checkpoints import read_checkpoints

CHECKPOINTS = Path(__file__).resolve().parents[2] / "support_matrix" / "published" / "checkpoints"
_OTHER = ("architectures", "model_type", "quantization_config", "torch_dtype", "dtype")  # what decides no size


def _of(
    hidden: int, inner: int, layers: int, heads: int, keys: int | None, vocab: int, dim: int | None = None, **other: Any
) -> dict[str, Any]:
    """The fields that most configurations have."""
    fields = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    optional = {"num_key_value_heads": keys, "head_dim": dim}
    return fields | {"num_attention_heads": heads} | {k: v for k, v in optional.items() if v is not None} | other


TIED = {"tie_word_embeddings": True}
QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
LLAMA4_TEXT = _of(5120, 8192, 48, 40, 8, 202048, 128) | {
    "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "model_type": "llama4_text",
}  # fmt: skip
CHATGLM = {
    "hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32, "kv_channels": 128,
    "multi_query_group_num": 2, "multi_query_attention": True, "add_qkv_bias": True, "add_bias_linear": False,
}  # fmt: skip

# Those of the catalogue of published checkpoints, by their names there.
PUBLISHED = {
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "Llama-3.3-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "Llama-3.2-1B": "meta-llama/Llama-3.2-1B-Instruct",
    "SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Mistral-7B-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
    "Ministral-8B": "mistralai/Ministral-8B-Instruct-2410",
    "Mistral-Nemo-12B": "mistralai/Mistral-Nemo-Instruct-2407",
    "Mistral-Small-24B": "mistralai/Mistral-Small-24B-Instruct-2501",
    "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1",
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen2.5-72B": "Qwen/Qwen2.5-72B-Instruct",
    "Qwen1.5-MoE-A2.7B": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
    "Qwen3-8B": "Qwen/Qwen3-8B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "gemma-7b": "google/gemma-7b",
    "gemma-2-9b": "google/gemma-2-9b-it",
    "gemma-2-27b": "google/gemma-2-27b-it",
    "gemma-3-1b": "google/gemma-3-1b-it",
    "phi-4": "microsoft/phi-4",
    "DeepSeek-V2-Lite": "deepseek-ai/DeepSeek-V2-Lite",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
    "Kimi-K2": "moonshotai/Kimi-K2-Instruct",
    "DeepSeek-V3.2": "deepseek-ai/DeepSeek-V3.2",
    "GLM-4.5-Air": "zai-org/GLM-4.5-Air",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "OLMo-2-7B": "allenai/OLMo-2-1124-7B-Instruct",
    "granite-3.3-8b": "ibm-granite/granite-3.3-8b-instruct",
    "granite-4.0-h-small": "ibm-granite/granite-4.0-h-small",
    "starcoder2-7b": "bigcode/starcoder2-7b",
    "ERNIE-4.5-0.3B": "baidu/ERNIE-4.5-0.3B-PT",
    "Hunyuan-A13B": "tencent/Hunyuan-A13B-Instruct",
    "Jamba-v0.1": "ai21labs/Jamba-v0.1",
    "SmolLM3-3B": "HuggingFaceTB/SmolLM3-3B",
    "EXAONE-4.0-32B": "LGAI-EXAONE/EXAONE-4.0-32B",
    "Seed-OSS-36B": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "MiniMax-M2": "MiniMaxAI/MiniMax-M2.5",
    "Olmo-3-7B": "allenai/Olmo-3-7B-Instruct",
    "OLMo-7B": "allenai/OLMo-7B-hf",
    "Jais-2-8B": "inceptionai/Jais-2-8B-Chat",
    "internlm2_5-7b": "internlm/internlm2_5-7b-chat",
    "internlm3-8b": "internlm/internlm3-8b-instruct",
    "MiMo-7B": "XiaomiMiMo/MiMo-7B-Base",
}


def _published() -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    rows = {checkpoint.id: checkpoint.config for checkpoint in read_checkpoints(CHECKPOINTS)}
    for name, published in PUBLISHED.items():
        (architecture,) = rows[published]["architectures"]
        yield name, (architecture, {field: value for field, value in rows[published].items() if field not in _OTHER})


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict(_published()),
    "Llama-4-Scout": ("Llama4ForCausalLM", LLAMA4_TEXT),
    "Llama-4-Maverick": ("Llama4ForCausalLM", LLAMA4_TEXT | {"num_local_experts": 128, "interleave_moe_layer_step": 2}),
    "Mixtral-8x22B": (
        "MixtralForCausalLM",
        _of(6144, 16384, 56, 48, 8, 32768, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    ),
    "Qwen3-Next-80B-A3B": (
        "Qwen3NextForCausalLM",
        _of(2048, 5120, 48, 16, 2, 151936, 256, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512)
        | {"shared_expert_intermediate_size": 512, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
        | {"linear_value_head_dim": 128}
        | QWEN_MOE,
    ),
    "gemma-3-4b": (  # without its vision tower, as the next one
        "Gemma3ForCausalLM",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
    ),
    "gemma-3-27b": ("Gemma3ForCausalLM", _of(5376, 21504, 62, 32, 16, 262208, 128, sliding_window=1024)),
    "phi-2": ("PhiForCausalLM", _of(2560, 10240, 32, 32, 32, 51200, qk_layernorm=False)),
    "Phi-3.5-mini": ("Phi3ForCausalLM", _of(3072, 8192, 32, 32, 32, 32064, sliding_window=262144)),
    "Phi-3.5-MoE": (
        "PhiMoEForCausalLM",
        _of(4096, 6400, 32, 32, 8, 32064, num_local_experts=16, num_experts_per_tok=2, attention_bias=True)
        | {"lm_head_bias": True, "sliding_window": 131072},
    ),
    "GLM-4-9B-0414": ("Glm4ForCausalLM", _of(4096, 13696, 40, 32, 2, 151552, 128, attention_bias=True)),
    "glm-4-9b-hf": ("GlmForCausalLM", _of(4096, 13696, 40, 32, 2, 151552, 128, attention_bias=True)),
    "GLM-4.6": (
        "Glm4MoeForCausalLM",
        _of(5120, 12288, 92, 96, 8, 151552, 128, attention_bias=True, n_routed_experts=160, n_shared_experts=1)
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "use_qk_norm": True},
    ),
    "OLMoE-1B-7B": (
        "OlmoeForCausalLM",
        _of(2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
    ),
    "granite-3.1-3b-a800m": (
        "GraniteMoeForCausalLM",
        _of(1536, 512, 32, 24, 8, 49155, num_local_experts=40, num_experts_per_tok=8, **TIED),
    ),
    "c4ai-command-r-v01": ("CohereForCausalLM", _of(8192, 22528, 40, 64, 64, 256000, use_qk_norm=False)),
    "c4ai-command-r7b": ("Cohere2ForCausalLM", _of(4096, 14336, 32, 32, 8, 256000, sliding_window=4096)),
    "falcon-7b": (
        "FalconForCausalLM",
        {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024}
        | {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False},
    ),
    "Falcon-H1-7B": (
        "FalconH1ForCausalLM",
        _of(3072, 12288, 44, 12, 2, 130049, 128, tie_word_embeddings=False)
        | {"mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_n_groups": 1}
        | {"mamba_rms_norm": False, "projectors_bias": False},
    ),
    "stablelm-2-12b": (
        "StableLmForCausalLM",
        _of(5120, 13824, 40, 32, 8, 100352, use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=False),
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}),
    "gpt2-xl": ("GPT2LMHeadModel", {"n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024}),
    "gpt-j-6b": ("GPTJForCausalLM", {"n_embd": 4096, "n_head": 16, "n_layer": 28, "vocab_size": 50400}),
    "gpt-neox-20b": ("GPTNeoXForCausalLM", _of(6144, 24576, 44, 64, None, 50432)),
    "opt-6.7b": (
        "OPTForCausalLM",
        {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"word_embed_proj_dim": 4096, "max_position_embeddings": 2048, "vocab_size": 50272},
    ),
    "bloom-7b1": (
        "BloomForCausalLM",
        {"n_embed": 4096, "n_layer": 30, "num_attention_heads": 32, "vocab_size": 250880},
    ),
    "xglm-564M": ("XGLMForCausalLM", {"d_model": 1024, "ffn_dim": 4096, "num_layers": 24, "attention_heads": 16}),
    "mpt-7b": ("MptForCausalLM", {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432}),
    "Minitron-8B": ("NemotronForCausalLM", _of(4096, 16384, 32, 48, 8, 256000, 128)),
    "Nemotron-H-8B": (
        "NemotronHForCausalLM",
        _of(4096, 21504, 52, 32, 8, 131072, 128, mamba_num_heads=128, mamba_head_dim=64, n_groups=8)
        | {"ssm_state_size": 128, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},
    ),
    "Nemotron-3-Nano-30B-A3B": (
        "NemotronHForCausalLM",
        _of(2688, 1856, 52, 32, 2, 131072, 128, mamba_num_heads=64, mamba_head_dim=64, n_groups=8, ssm_state_size=128)
        | {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
        | {"moe_shared_expert_intermediate_size": 3712}
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
    ),
    "MiniCPM3-4B": (
        "MiniCPM3ForCausalLM",
        _of(2560, 6400, 62, 40, 40, 73448, q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64, v_head_dim=64)
        | {"qk_rope_head_dim": 32},
    ),
    "ERNIE-4.5-21B-A3B": (
        "Ernie4_5_MoeForCausalLM",
        _of(2560, 12288, 28, 20, 4, 103424, moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, **TIED)
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 27, "use_bias": False},
    ),
    "Hunyuan-7B": ("HunYuanDenseV1ForCausalLM", _of(4096, 14336, 32, 32, 8, 128256, 128, **TIED)),
    "dots.llm1": (
        "Dots1ForCausalLM",
        _of(4096, 10944, 62, 32, 32, 152064, 128, n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6)
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "sliding_window": None},
    ),
    "Bamba-9B": (
        "BambaForCausalLM",
        _of(4096, 14336, 32, 32, 8, 128256, attn_layer_indices=[9, 18, 27], mamba_n_heads=128, mamba_d_head=64)
        | {"mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2},
    ),
    "Mamba-Codestral-7B": (
        "Mamba2ForCausalLM",
        {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768, "num_heads": 128, "n_groups": 8}
        | {"state_size": 128, "head_dim": 64, "expand": 2, "tie_word_embeddings": False},
    ),
    "LFM2-1.2B": (
        "Lfm2ForCausalLM",
        _of(2048, 12288, 16, 32, 8, 65536, block_ff_dim=12288, block_multiple_of=256, block_ffn_dim_multiplier=1.0)
        | {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "block_auto_adjust_ff_dim": True},
    ),
    "MiniMax-Text-01": (
        "MiniMaxForCausalLM",
        _of(6144, 9216, 80, 64, 8, 200064, 128, num_local_experts=32, num_experts_per_tok=2)
        | {"layer_types": ["linear_attention" if (i + 1) % 8 else "full_attention" for i in range(80)]},
    ),
    "Kimi-Linear-48B-A3B": ("KimiLinearForCausalLM", {}),
    "AFM-4.5B": ("ArceeForCausalLM", _of(2560, 18432, 36, 20, 4, 128004, 128)),
    "Apertus-8B": ("ApertusForCausalLM", _of(4096, 21504, 32, 32, 8, 131072)),
    "Ministral-3-3B": ("Ministral3ForCausalLM", _of(3072, 9216, 26, 32, 8, 131072, 128, **TIED)),
    "Ministral-3-8B": ("Ministral3ForCausalLM", _of(4096, 14336, 34, 32, 8, 131072, 128)),
    "EXAONE-4.0-1.2B": (
        "Exaone4ForCausalLM",
        _of(2048, 4096, 30, 32, 8, 102400, 64, sliding_window=None, layer_types=["full_attention"] * 30, **TIED),
    ),
    "persimmon-8b": ("PersimmonForCausalLM", _of(4096, 16384, 36, 64, None, 262144)),
    # of classes that transformers lacks
    "EXAONE-3.5-7.8B": (
        "ExaoneForCausalLM",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 102400, "tie_word_embeddings": False},
    ),
    "Baichuan2-7B": (
        "BaichuanForCausalLM",
        _of(4096, 11008, 32, 32, None, 125696, max_position_embeddings=4096, model_max_length=4096),
    ),
    "Baichuan2-13B": ("BaichuanForCausalLM", _of(5120, 13696, 40, 40, None, 125696, model_max_length=4096)),
    "chatglm3-6b": ("ChatGLMModel", CHATGLM | {"num_layers": 28, "padded_vocab_size": 65024}),
    "glm-4-9b-chat": ("ChatGLMModel", CHATGLM | {"num_layers": 40, "padded_vocab_size": 151552, "rope_ratio": 500}),
    "solar-pro-preview": ("SolarForCausalLM", _of(5120, 17920, 64, 40, 10, 32128, sliding_window=2047)),
}


def model_type_of(architecture: str) -> str:
    """The model type of a class whose sizes are known."""
    facts = find(architecture)
    return (facts and facts.model_type) or architecture.removesuffix("ForCausalLM").lower()
