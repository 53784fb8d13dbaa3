"""What transformers says about sizes: models on `meta` of known families, and small models with varied fields."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from sizes_published import model_type_of
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from srv.models.families.registry import BUILT_IN, built_in_native_names, is_native
from srv.models.families.trees import tree_for_sizes
from srv.models.unsupported import InvalidConfig, UnknownSizes

UNMADE = ("DbrxForCausalLM",)  # whose class reads a field that its configuration does not take
# With native layers, and a class in transformers.
CAUSAL = [
    name
    for name in built_in_native_names()
    if name.endswith(("ForCausalLM", "LMHeadModel")) and model_type_of(name) in CONFIG_MAPPING and name not in UNMADE
]  # with native layers, of which transformers has the configuration
KNOWN = sorted(name for name in BUILT_IN if name in CAUSAL or not is_native(name))
# Values of fields, of which a variation draws one each; "leave" leaves the field out.
LEAVE = object()
CHOICES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (96, 131),
    "hidden_size": (32, 48),
    "intermediate_size": (24, 56),
    "num_hidden_layers": (2, 5, 7),
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (1, 2, 4),
    "num_kv_heads": (1, 2, 4),
    "head_dim": (8, 16, LEAVE),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "attention_out_bias": (True, False),
    "mlp_bias": (True, False),
    "use_bias": (True, False),
    "qkv_bias": (True, False),
    "use_qkv_bias": (True, False),
    "bias": (True, False),
    "enable_bias": (True, False),
    "lm_head_bias": (True, False),
    "conv_bias": (True, False),
    "use_conv_bias": (True, False),
    "mamba_conv_bias": (True, False),
    "mamba_proj_bias": (True, False),
    "projectors_bias": (True, False),
    "qk_layernorm": (True, False),
    "use_qk_norm": (True, False),
    "use_parallel_residual": (True, False),
    "parallel_attn": (True, False),
    "multi_query": (True, False),
    "new_decoder_architecture": (True, False),
    "num_ln_in_parallel_attn": (None, 1, 2),
    "layer_norm_elementwise_affine": (True, False),
    "do_layer_norm_before": (True, False),
    "word_embed_proj_dim": (32, 48, 16),
    "ffn_dim": (40,),
    "ffn_hidden_size": (None, 40),
    "n_inner": (None, 40),
    "expansion_ratio": (2, 4),
    "max_position_embeddings": (64,),
    "pad_token_id": (0,),
    "expand": (2,),
    "rotary_dim": (4,),
    "num_heads": (4, 8),
    "sliding_window": (5, 12, None),
    "use_sliding_window": (True, False),
    "max_window_layers": (1, 3),
    "sliding_window_pattern": (2, 3),
    "attention_chunk_size": (6,),
    "num_experts": (4, 6),
    "num_local_experts": (4, 6),
    "n_routed_experts": (4, 8),
    "moe_num_experts": (4, 6),
    "num_experts_per_tok": (1, 2),
    "moe_k": (2,),
    "moe_topk": (1, 2),
    "moe_intermediate_size": (16, 24),
    "intermediate_size_mlp": (40,),
    "shared_expert_intermediate_size": (16, 40),
    "moe_shared_expert_intermediate_size": (16, 40),
    "shared_intermediate_size": (16, 40),
    "moe_latent_size": (None, 16),
    "n_shared_experts": (1, 2),
    "num_shared_experts": (1, 2),
    "moe_num_shared_experts": (0, 1, 2),
    "n_group": (1,),
    "topk_group": (1,),
    "first_k_dense_replace": (0, 1, 2),
    "num_dense_layers": (0, 1, 2),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [1], LEAVE),
    "moe_layer_interval": (1, 2),
    "moe_layer_start_index": (0, 1),
    "moe_layer_end_index": (-1, 1),
    "interleave_moe_layer_step": (1, 2),
    "no_rope_layer_interval": (2, 3),
    "use_expert_bias": (True, False),
    "q_lora_rank": (None, 12),
    "kv_lora_rank": (16, 20),
    "qk_rope_head_dim": (4, 8),
    "qk_nope_head_dim": (8, 12),
    "v_head_dim": (8, 12),
    "index_n_heads": (4,),
    "index_head_dim": (8,),
    "index_topk": (8,),
    "state_size": (8, 16),
    "ssm_state_size": (8, 16),
    "mamba_d_state": (8, 16),
    "conv_kernel": (4,),
    "mamba_d_conv": (4,),
    "linear_conv_kernel_dim": (4,),
    "conv_L_cache": (3,),
    "n_groups": (1, 2),
    "mamba_n_groups": (1, 2),
    "mamba_n_heads": (8,),
    "mamba_num_heads": (4, 8),
    "mamba_head_dim": (8,),
    "mamba_d_ssm": (None, 48),
    "mamba_rms_norm": (True, False),
    "attn_layer_indices": ([1], [0, 1]),
    "attn_layer_period": (2, 3),
    "attn_layer_offset": (1,),
    "expert_layer_period": (2,),
    "expert_layer_offset": (0, 1),
    "full_attn_idxs": (None, [1]),
    "block_auto_adjust_ff_dim": (True, False),
    "block_ffn_dim_multiplier": (None, 1.3),
    "block_multiple_of": (16,),
    "linear_num_key_heads": (2,),
    "linear_num_value_heads": (2, 4),
    "linear_key_head_dim": (8,),
    "linear_value_head_dim": (8, 12),
    "linear_head_dim": (8,),
    "linear_num_heads": (4,),
    "time_step_rank": (3, "auto"),
    "hidden_size_per_layer_input": (8,),
    "vocab_size_per_layer_input": (80,),
    "laurel_rank": (4,),
    "altup_num_inputs": (2, 3),
    "num_kv_shared_layers": (0,),
    # vision towers
    "depth": (2, 3),
    "patch_size": (4,),
    "image_size": (16,),
    "out_hidden_size": (32,),
    "num_position_embeddings": (16,),
    "deepstack_visual_indexes": ([0], [0, 1]),
    "pixel_shuffle_ratio": (0.5,),
    "projector_input_dim": (24,),
    "projector_output_dim": (24,),
    "vision_output_dim": (24,),
    "spatial_merge_size": (2,),
}
SLIDING, ATTENDING = ("full_attention", "sliding_attention"), "full_attention"
# The kinds of layers of models whose configurations may state one per layer.
LAYER_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen2", "qwen3", "gemma2", "gemma3_text", "ministral", "olmo3", "cohere2", "exaone4"), SLIDING),
    **dict.fromkeys(("gpt_oss", "smollm3", "dots1", "exaone_moe", "mimo_v2_flash", "afmoe"), SLIDING),
    **dict.fromkeys(("lfm2", "lfm2_moe"), (ATTENDING, "conv")),
    "lfm3": (*SLIDING, "conv"),
    "olmo_hybrid": (ATTENDING, "linear_attention"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"), (ATTENDING, "linear_attention")),
    "minimax": (ATTENDING, "linear_attention"),
    "granitemoehybrid": ("attention", "mamba"),
    "llama4_text": (ATTENDING, "chunked_attention"),
}
TOKENS = 21
REFUSALS = (ValueError, TypeError, KeyError, IndexError, RuntimeError, ArithmeticError, AttributeError,
            StrictDataclassError)  # fmt: skip
RETURN_NO_CACHE = ("recurrent_gemma",)  # its class keeps states in its modules
ALWAYS_STATED = ("lfm2_moe", "granitemoehybrid")


def config_class(model_type: str) -> Any:
    return CONFIG_MAPPING[model_type]


def meta_model(architecture: str, config: Any) -> torch.nn.Module:
    """The model of transformers, without memory."""
    with torch.device("meta"):
        return make_model(architecture, config)


def make_model(architecture: str, config: Any) -> torch.nn.Module:
    """The model of transformers in bfloat16; some classes are listed for the configuration of a whole alone."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not architecture.endswith("ConditionalGeneration"):
        alone: torch.nn.Module = getattr(transformers, architecture)._from_config(config, dtype=torch.bfloat16)
        return alone.eval()
    auto = AutoModelForImageTextToText if architecture.endswith("ConditionalGeneration") else AutoModelForCausalLM
    model: torch.nn.Module = auto.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def parameters(model: torch.nn.Module) -> int:
    """Tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def stored_buffers(model: torch.nn.Module) -> int:
    """Elements of the buffers that a checkpoint contains."""
    return sum(tensor.numel() for tensor in model.state_dict().values()) - sum(
        tensor.numel() for name, tensor in model.named_parameters(remove_duplicate=False)
    )


class Run(NamedTuple):
    """A small model of transformers, and its cache after `TOKENS` tokens."""

    fields: dict[str, Any]
    config: Any
    model: torch.nn.Module
    cache: Any


def small_runs(architecture: str, count: int, seed: int = 0) -> Iterator[Run]:
    """`count` models with drawn fields, as in config.json, that transformers accepts and can compute.

    Of an architecture with native layers, those whose sizes they determine.
    """
    refusals = (*REFUSALS, InvalidConfig, UnknownSizes) if architecture in CAUSAL else REFUSALS
    draw, run_count = random.Random(f"{architecture} {seed}"), 0
    for _ in range(60 * count):
        fields = _draw(config_class(model_type_of(architecture)), draw)
        with contextlib.suppress(*refusals):
            tree_for_sizes(architecture, fields)
            config = config_class(model_type_of(architecture))(**_copy(fields))
            model = make_model(architecture, config)
            yield Run(fields, config, model, cache_after(model))
            run_count += 1
        if run_count == count:
            return
    raise AssertionError(f"transformers computes only {run_count} of the configurations of {architecture}")


def cache_after(model: torch.nn.Module) -> Any:
    """The cache of one sequence of `TOKENS` tokens."""
    with torch.no_grad():
        tokens = torch.arange(1, TOKENS + 1).unsqueeze(0)
        if model.config.model_type in RETURN_NO_CACHE:
            cache = DynamicCache(config=model.config)
            model(input_ids=tokens, use_cache=True, past_key_values=cache)
            return cache
        output = model(input_ids=tokens, use_cache=True)
    return output["past_key_values"] if "past_key_values" in output else output["cache_params"]


def states_in_modules(model: torch.nn.Module, index: int) -> list[tuple[tuple[int, ...], str]]:
    """The states of a layer of RecurrentGemma, as in `cached_shapes`. It keeps one input less of the convolution."""
    block: Any = model.get_submodule(f"model.layers.{index}.temporal_block")
    if getattr(block, "conv1d_state", None) is None:
        return []
    conv, state = block.conv1d_state, block.rg_lru.recurrent_states
    states = (((conv.shape[1], conv.shape[2] + 1), conv.dtype), (tuple(state.shape[1:]), state.dtype))
    return [(shape, str(dtype).removeprefix("torch.")) for shape, dtype in states]


def cached_shapes(layer: Any) -> tuple[list[tuple[int, int, int, int]], list[tuple[tuple[int, ...], str]]]:
    """What one layer of transformers' cache holds: (tokens, heads, key size, value size), and (shape, dtype) of states.

    The key of an indexer has no value.
    """
    kept, states = [], []
    if getattr(layer, "keys", None) is not None:
        kept.append((layer.keys.shape[2], layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
    if getattr(layer, "indexer_keys", None) is not None:
        kept.append((layer.indexer_keys.shape[1], 1, layer.indexer_keys.shape[2], 0))
    for held in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        tensors = [state for state in held.values() if state is not None]
        states += [(tuple(state.shape[1:]), str(state.dtype).removeprefix("torch.")) for state in tensors]
    return kept, states


def _copy(value: Any) -> Any:
    return {name: _copy(member) for name, member in value.items()} if isinstance(value, dict) else value


def _draw(config: Any, draw: random.Random) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    real = config.attribute_map
    fields: dict[str, Any] = {}
    for name, options in CHOICES.items():
        value = draw.choice(options)
        if name in names and value is not LEAVE and real.get(name, name) not in fields:
            fields[real.get(name, name)] = value
    model_type = config.model_type
    if model_type in LAYER_KINDS and (model_type in ALWAYS_STATED or draw.random() < 0.5):
        fields["layer_types"] = draw.choices(LAYER_KINDS[model_type], k=fields["num_hidden_layers"])
    if model_type == "gemma3n_text":
        fields["num_kv_shared_layers"] = draw.choice((0, 1))
    if model_type == "mllama_text_model":
        fields["cross_attention_layers"] = draw.choice(([1], [0, 2], None))
    if "kv_lora_rank" in fields:
        fields.pop("num_key_value_heads", None)
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if model_type == "stablelm":
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    if model_type == "nemotron_h":
        fields["hybrid_override_pattern"] = "M*-E" + "".join(draw.choices("M*-E", k=3))
    for part in ("text_config", "vision_config"):
        if part in config.sub_configs:
            nested = config.sub_configs[part]
            fields[part] = {**_draw(nested, draw), "model_type": nested.model_type}
    return fields
