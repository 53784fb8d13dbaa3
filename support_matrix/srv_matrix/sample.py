"""The sample models with which cells are judged: common in every respect, so that a refusal is due to the argument.

They have no files, because resolution needs only their facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from srv.specs import FullAttention, Latent, ModelFacts, Recurrent, SlidingWindow, StateTensor

LAYERS = 32
_ALL = tuple(range(LAYERS))
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
_PACKED = ("awq", "gptq", "compressed-tensors")
_MODELSLIM = {"model_quant_type": "W8A8_DYNAMIC", "model.layers.0.mlp.down_proj.weight": "W8A8_DYNAMIC"}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
# The quantization_config of checkpoints of further methods.
_QUANT_CONFIGS: Mapping[str, Mapping[str, object]] = {
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "mxfp4": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": _MXFP4, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    },
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
}


@cache
def sample_models() -> tuple[ModelFacts, ...]:
    """The sample models; a value counts as refused only if it is refused with all of them."""
    dense = _dense()
    gguf = replace(dense, name="sample-8b-gguf", path="/models/sample-8b.gguf", format="gguf", dtype="float16")
    int8 = replace(dense, name="sample-8b-w8a8", path="/models/sample-8b-w8a8")
    modelslim = {**dense.config, "quantization_config": _MODELSLIM}
    return (
        dense,
        replace(gguf, quantization="gguf:Q4_1", weight_bytes=5_200_000_000),
        replace(int8, quantization="modelslim", config=modelslim, weight_bytes=9_100_000_000),
        replace(int8, quantization="w8a8_int8", stored_types={"int8": 6_980_000_000}, weight_bytes=9_100_000_000),
        *map(_packed, _PACKED),
    )


@cache
def special_models() -> tuple[ModelFacts, ...]:
    """Models with layers that the others lack, for values without effect on all others: windows, experts, latent
    attention, with an indexer too, recurrent states, and experts in blocks of 4 bits."""
    return windowed_model(), _mixture(), _latent(), _sparse(), recurrent_model(), _mixture_in_blocks()


@cache
def quantized_models() -> tuple[ModelFacts, ...]:
    """The common model in checkpoints of further methods, for values that name the method of a checkpoint."""
    return tuple(_quantized(method, quant_config) for method, quant_config in _QUANT_CONFIGS.items())


def _packed(method: str) -> ModelFacts:
    """The common model with integers of four bits in groups of 128."""
    quant_config: dict[str, object] = {"quant_method": method, "bits": 4, "group_size": 128}
    if method == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
        groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
        quant_config = {
            "quant_method": method,
            "format": "pack-quantized",
            "config_groups": groups,
            "ignore": ["lm_head"],
        }
    return replace(_quantized(method, quant_config), dtype="float16", weight_bytes=5_700_000_000)


def _quantized(method: str, quant_config: Mapping[str, object]) -> ModelFacts:
    dense = _dense()
    config = {**dense.config, "quantization_config": quant_config}
    model = replace(dense, name=f"sample-8b-{method}", path=f"/models/sample-8b-{method}", config=config)
    return replace(model, quantization=method)


def windowed_model() -> ModelFacts:
    """A model of which half of the layers have a sliding window."""
    dense = _dense()
    half = LAYERS // 2
    config = {**dense.config, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": half}
    full, rest = tuple(range(half)), tuple(range(half, LAYERS))
    groups = (FullAttention(full, 8, 128, 128), SlidingWindow(rest, 8, 128, 128, 4096))
    return replace(dense, name="sample-8b-windows", architecture="Qwen2ForCausalLM", config=config, cache_groups=groups)


def _mixture() -> ModelFacts:
    """A mixture of 32 experts in every layer, of which each token uses four."""
    dense = _dense()
    config = {**dense.config, **_EXPERTS, "hidden_size": 2048, "intermediate_size": 6144}
    return replace(
        dense,
        name="sample-6b-experts",
        path="/models/sample-6b-experts",
        architecture="Qwen3MoeForCausalLM",
        config=config,
        hidden_size=2048,
        parameters=6_030_501_888,
        active_parameters=1_802_643_456,
        weight_bytes=12_061_003_776,
    )


def _mixture_in_blocks() -> ModelFacts:
    """The mixture in a GGUF file of MXFP4."""
    model = replace(_mixture(), name="sample-6b-mxfp4.gguf", path="/models/sample-6b-mxfp4.gguf", format="gguf")
    stored = {"MXFP4": 5_410_000_000, "BF16": 620_000_000}
    return replace(model, quantization="gguf:MXFP4", stored_types=stored, weight_bytes=4_114_000_000)


def _latent() -> ModelFacts:
    """A mixture of experts with multi-head latent attention."""
    mixture = _mixture()
    sizes = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    experts = {"n_routed_experts": 32, "n_shared_experts": 2, "first_k_dense_replace": 1}
    config = {**mixture.config, **sizes, **experts, "v_head_dim": 128, "num_key_value_heads": 32}
    return replace(
        mixture,
        name="sample-6b-latent",
        path="/models/sample-6b-latent",
        architecture="DeepseekV2ForCausalLM",
        config=config,
        kv_heads=1,
        head_dim=192,
        cache_groups=(Latent(_ALL, 512, 64),),
    )


def _sparse() -> ModelFacts:
    """The model with latent attention, in which an indexer chooses 2,048 keys for each query."""
    latent = _latent()
    index = {"q_lora_rank": 1536, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    groups = {"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return replace(
        latent,
        name="sample-6b-sparse",
        path="/models/sample-6b-sparse",
        architecture="DeepseekV32ForCausalLM",
        config={**latent.config, **index, **groups},
        cache_groups=(Latent(_ALL, 512, 64, index_dim=128, indexed=_ALL),),
    )


@cache
def recurrent_model() -> ModelFacts:
    """A mixture of experts of which three of four layers keep a recurrent state instead of keys and values."""
    mixture = _mixture()
    delta = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    config = {**mixture.config, **delta, **heads, "full_attention_interval": 4, "shared_expert_intermediate_size": 768}
    states = (StateTensor("conv", (8192, 4), "bfloat16"), StateTensor("state", (32, 128, 128), "float32"))
    groups = (FullAttention(_ALL[3::4], 8, 128, 128), Recurrent(tuple(n for n in _ALL if n % 4 != 3), states))
    return replace(
        mixture,
        name="sample-6b-recurrent",
        path="/models/sample-6b-recurrent",
        architecture="Qwen3NextForCausalLM",
        config=config,
        cache_groups=groups,
    )


def _config(**sizes: int) -> dict[str, object]:
    """The fields of `config.json` that native layers need."""
    return {
        **sizes,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }


def _dense() -> ModelFacts:
    """A decoder of eight billion parameters in bfloat16: 32 query heads, 8 KV heads of 128, context 131072."""
    return ModelFacts(
        name="sample-8b",
        path="/models/sample-8b",
        format="safetensors",
        architecture="LlamaForCausalLM",
        config=_config(hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32),
        dtype="bfloat16",
        quantization=None,
        vocab_size=128256,
        hidden_size=4096,
        layers=LAYERS,
        heads=32,
        kv_heads=8,
        head_dim=128,
        context_length=131072,
        parameters=8_030_000_000,
        weight_bytes=16_060_000_000,
        cache_groups=(FullAttention(tuple(range(LAYERS)), 8, 128, 128),),
    )


@cache
def small_model() -> ModelFacts:
    """A decoder of three billion parameters, which fits on every described device with default settings."""
    layers = 28
    return replace(
        _dense(),
        name="sample-3b",
        path="/models/sample-3b",
        config=_config(hidden_size=3072, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=24),
        hidden_size=3072,
        layers=layers,
        heads=24,
        parameters=3_210_000_000,
        weight_bytes=6_420_000_000,
        cache_groups=(FullAttention(tuple(range(layers)), 8, 128, 128),),
    )
