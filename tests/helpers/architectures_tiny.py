"""Tiny random models of all causal architectures of transformers: sizes by names of fields, exceptions as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from models_small import randomized
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 48, 6, 2, 8, 97

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "d_model": HIDDEN,
    "n_embd": HIDDEN,
    "embedding_size": HIDDEN,
    "emb_dim": HIDDEN,
    "embed_dim": HIDDEN,
    "input_embedding_size": HIDDEN,
    "intermediate_size": 80,
    "d_ff": 80,
    "d_inner": 80,
    "ffn_dim": 80,
    "ffn_hidden_size": 80,
    "n_inner": 80,
    "dff": 80,
    "dim_ff": 80,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layers": LAYERS,
    "n_layer": LAYERS,
    "encoder_layers": 1,
    "decoder_layers": LAYERS,
    "num_encoder_layers": 1,
    "num_decoder_layers": LAYERS,
    "num_attention_heads": HEADS,
    "n_head": HEADS,
    "n_heads": HEADS,
    "num_heads": HEADS,
    "attention_heads": HEADS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "num_encoder_attention_heads": HEADS,
    "num_decoder_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "attention_head_dim": HEAD_DIM,
    "dim_head": HEAD_DIM,
    "query_pre_attn_scalar": HEAD_DIM,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_seq_len": 256,
    "seq_length": 256,
    "initializer_range": 0.25,
    "init_std": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "word_embed_proj_dim": HIDDEN,
    # windows shorter than the prompts
    "sliding_window": 7,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_chunk_size": 8,
    "window_size": 7,
    "local_attention": 7,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "zero_expert_num": 1,
    # latent attention
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 16,  # so that few keys have the score 0, which would be that of others
    "index_head_dim": 8,
    "index_topk": 8,
    # recurrent layers
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_heads": 12,
    "mamba_d_head": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_mamba_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "expand": 2,
    "time_step_rank": 3,
    "rotary_dim": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 0,
}
# vision and audio towers, of which only text is computed
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "adapter_in_dim": 16,
    "adapter_input_size": 16,
    "adapter_out_dim": HIDDEN,
    "adapter_output_size": HIDDEN,
    "head_dim": 8,
}
DELTA_AND_ATTENTION = ["linear_attention", "full_attention"]  # by default, only every fourth layer attends
# The two upper layers attend with the keys and values of the two lower ones.
SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
}
# The embedding of a padding token is 0, and so are then all scores of an indexer: which keys are chosen is not defined.
NO_PADDING = {"pad_token_id": None}
# What a model needs beside, by model type. `...` leaves a field at its default.
SPECIAL: dict[str, dict[str, Any]] = {
    "axk2": NO_PADDING,
    "deepseek_v32": NO_PADDING,
    # the second layer attends to the keys that the indexer of the first one has chosen
    "glm_moe_dsa": {**NO_PADDING, "indexer_types": ["full", "shared"]},
    "hy_v4": {**NO_PADDING, "num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "flint": {"layer_types": ["full_attention", "sliding_attention"], "mlp_only_layers": [0]},
    "gemma3n_text": {**SHARED_KEYS, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]},
    "gemma4_text": {**SHARED_KEYS, "global_head_dim": 2 * HEAD_DIM},
    "gemma4_unified_text": {**SHARED_KEYS, "global_head_dim": 2 * HEAD_DIM},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": DELTA_AND_ATTENTION},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "sliding_attention"]},
    "qwen3_5": {"text_config": {"layer_types": DELTA_AND_ATTENTION}},
    "qwen3_5_moe": {"text_config": {"layer_types": DELTA_AND_ATTENTION}},
    "qwen3_5_moe_text": {"layer_types": DELTA_AND_ATTENTION},
    "qwen3_5_text": {"layer_types": DELTA_AND_ATTENTION},
    "qwen3_next": {"layer_types": DELTA_AND_ATTENTION},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 7},
    "olmo_hybrid": {  # its class saves the convolution of queries, keys and values in three parts of equal size
        "layer_types": DELTA_AND_ATTENTION,
        "linear_num_key_heads": 4,
    },
    "longcat_flash": {"head_dim": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "mimo_v2_flash": {  # twice as many KV heads in layers with a window, and values that are smaller than keys
        "num_key_value_heads": 3,
        "v_head_dim": HEAD_DIM // 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "dots3_note": {"vision_config": {"per_layer_config": {}}},
    "blt": {  # the sizes of its parts depend on one another
        "encoder_config": {"hidden_size_global": 16},
        "decoder_config": {"hidden_size_global": 16},
        "encoder_hash_byte_group_vocab": 50,
    },
    "codegen": {"n_head": 4},  # its class divides them by four
    "falcon_h1": {"mamba_d_ssm": 96},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 12, "n_groups": 1},
    "nemotron_h": {"hybrid_override_pattern": "M*-E", "n_groups": 1},
    "reformer": {"axial_pos_embds": False},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": 2 * ["mamba", "hybrid"]},  # hybrid ones share weights
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "moshi": {"audio_vocab_size": VOCAB},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
# Models whose parts for images need packages that are not installed: only their language models are made.
TEXT_ALONE = ("gemma3n",)
# Models that compute no text from tokens alone: those that assist others, and decoders of audio.
WITHIN_OTHERS = ("gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody")


def model_types() -> tuple[str, ...]:
    """Every model type that has a causal class, in the order of transformers."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_class(model_type: str) -> Any:
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return cls[0] if isinstance(cls, tuple | list) else cls


def tiny_fields(config_class: Any, sizes: Mapping[str, Any] = TINY) -> dict[str, Any]:
    """The fields of a configuration that have a tiny size, each once, and those of its parts."""
    names = {field.name for field in dataclasses.fields(config_class)}
    real = config_class.attribute_map
    fields = {name: value for name, value in sizes.items() if name in names}
    for name, value in sizes.items():
        if name in real:
            fields.setdefault(real[name], value)
    for name, part in config_class.sub_configs.items():
        if part is AutoConfig:
            part = type(getattr(config_class(), name))
        if dataclasses.is_dataclass(part):
            nested = tiny_fields(part, TINY if "text" in name or name == "decoder" else TOWER)
            fields[name] = {**nested, "model_type": part.model_type}
    if "kv_lora_rank" in fields:  # every head has keys and values of its own, of the sizes above
        fields = {name: value for name, value in fields.items() if name != "head_dim"} | {"num_key_value_heads": HEADS}
    return _merged(fields, SPECIAL.get(config_class.model_type, {}))


def _merged(fields: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in special.items():
        old = merged.pop(name, None)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[name] = _merged(old, value)
        elif value is not ...:
            merged[name] = value
    return merged


def tiny_config(model_type: str) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**tiny_fields(config_class))


def tiny_model(model_type: str) -> Any:
    """The model in float32 with its own attention."""
    config = tiny_config(model_type)
    if model_type in TEXT_ALONE:
        config = config.get_text_config()
    torch.manual_seed(0)
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
