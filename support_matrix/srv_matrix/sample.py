"""The sample models with which cells are judged: common in every respect, so that a refusal is due to the argument.

They have no files, because resolution needs only their facts.
"""

from __future__ import annotations

from dataclasses import replace

from srv.specs import FullAttention, ModelFacts

_LAYERS = 32


def sample_models() -> tuple[ModelFacts, ...]:
    """The sample models; a value counts as refused only if it is refused with all of them."""
    dense = _dense()
    gguf = replace(dense, name="sample-8b-gguf", path="/models/sample-8b.gguf", format="gguf", dtype="float16")
    eight = replace(dense, name="sample-8b-w8a8", path="/models/sample-8b-w8a8", quantization="modelslim")
    return (
        dense,
        replace(gguf, quantization="gguf:Q4_1", weight_bytes=5_200_000_000),
        replace(eight, weight_bytes=9_100_000_000),
        replace(eight, quantization="w8a8_int8", stored_types={"int8": 6_980_000_000}, weight_bytes=9_100_000_000),
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
        config=_config(hidden_size=4096, intermediate_size=14336, num_hidden_layers=_LAYERS, num_attention_heads=32),
        dtype="bfloat16",
        quantization=None,
        vocab_size=128256,
        hidden_size=4096,
        layers=_LAYERS,
        heads=32,
        kv_heads=8,
        head_dim=128,
        context_length=131072,
        parameters=8_030_000_000,
        weight_bytes=16_060_000_000,
        cache_groups=(FullAttention(tuple(range(_LAYERS)), 8, 128, 128),),
    )


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
