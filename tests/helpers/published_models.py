"""Configurations of published models, from 0.1 to 1,000 billion parameters, without weights.

Sizes and fields are those of each model's config.json on the hub, as far as srv or transformers reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        **more,
    }


def _as(architecture: str, model_type: str, config: Config, **more: Any) -> Config:
    return {**config, "architectures": [architecture], "model_type": model_type, **more}


_LLAMA_8B = _llama(4096, 14336, 32, 32, 8, 128256)
_QWEN3_32B = _as(
    "Qwen3ForCausalLM", "qwen3", _llama(5120, 25600, 64, 64, 8, 151936, max_position_embeddings=40960), head_dim=128
)
_INT8_CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_INT8_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"weights": _INT8_CHANNEL, "input_activations": _INT8_TOKEN, "targets": ["Linear"]}},
}
_MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_EXPERTS = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
_FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
_DEEPSEEK = _as(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    _llama(7168, 18432, 61, 128, 128, 129280, max_position_embeddings=163840),
    quantization_config=_FP8_BLOCKS,
    **_MLA,
    **_EXPERTS,
)
_WINDOWS = ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(34)]

MODELS: dict[str, Config] = {
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True, max_position_embeddings=8192),
    "qwen2.5-0.5b": _as("Qwen2ForCausalLM", "qwen2", _llama(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True)),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "smollm3-3b": _as("SmolLM3ForCausalLM", "smollm3", _llama(2048, 11008, 36, 16, 4, 128256, rms_norm_eps=1e-6)),
    "qwen3-4b": _as(
        "Qwen3ForCausalLM", "qwen3", _llama(2560, 9728, 36, 32, 8, 151936, tie_word_embeddings=True), head_dim=128
    ),
    "gemma-3-4b": _as(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _llama(2560, 10240, 34, 8, 4, 262208, rope_theta=1000000.0),
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        layer_types=_WINDOWS,
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000.0,
        sliding_window=1024,
    ),
    "mistral-7b": _as(
        "MistralForCausalLM", "mistral", _llama(4096, 14336, 32, 32, 8, 32768, max_position_embeddings=32768)
    ),
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-8b-awq": {**_LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
    "llama-3.1-8b-gptq": {**_LLAMA_8B, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
    "llama-3.1-8b-w8a8": {**_LLAMA_8B, "quantization_config": _W8A8},
    "granite-3.3-8b": _as(
        "GraniteForCausalLM",
        "granite",
        _llama(4096, 12800, 40, 32, 8, 49159, tie_word_embeddings=True),
        attention_multiplier=0.0078125,
        embedding_multiplier=12.0,
        logits_scaling=16.0,
        residual_multiplier=0.22,
    ),
    "qwen3-32b": _QWEN3_32B,
    "qwen3-32b-fp8": {**_QWEN3_32B, "quantization_config": _FP8_BLOCKS},
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "deepseek-v3": _DEEPSEEK,
    "kimi-k2": {**_DEEPSEEK, "n_routed_experts": 384, "num_attention_heads": 64, "vocab_size": 163840},
    # served by the classes of transformers, or by nothing
    "gemma-2-9b": _as(
        "Gemma2ForCausalLM",
        "gemma2",
        _llama(3584, 14336, 42, 16, 8, 256000, max_position_embeddings=8192, tie_word_embeddings=True),
        head_dim=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=256,
        sliding_window=4096,
    ),
    "mixtral-8x7b": _as(
        "MixtralForCausalLM",
        "mixtral",
        _llama(4096, 14336, 32, 32, 8, 32000, max_position_embeddings=32768),
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "gpt-oss-20b": _as(
        "GptOssForCausalLM",
        "gpt_oss",
        _llama(2880, 2880, 24, 64, 8, 201088),
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        quantization_config={"quant_method": "mxfp4"},
    ),
    "qwen2-vl-7b": _as(
        "Qwen2VLForConditionalGeneration", "qwen2_vl", _llama(3584, 18944, 28, 28, 4, 152064), vision_config={}
    ),
}


def write_models(root: Path) -> None:
    """A folder with a config.json for each model."""
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
