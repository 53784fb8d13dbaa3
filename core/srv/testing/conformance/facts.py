"""Facts of the small models that the kit resolves and builds. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.specs import FullAttention, ModelFacts

LAYERS = 2
VOCABULARY = 272  # three special tokens, one token per byte, and some that no text contains
END_TOKEN = 2
MODEL_OPS = ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul")  # the ops that the layers of every model use
DTYPES = ("float32", "bfloat16", "float16")  # in the order in which checks prefer them
OP_SIZE = 64  # of every dimension when it is asked whether an implementation fits

# Fields of models with experts, and with a sliding window.
MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5}


def small_model(
    dtype: str = "float32",
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    context_length: int = 512,
    fields: Mapping[str, Any] = MappingProxyType({}),
    quantization: str | None = None,
) -> ModelFacts:
    """Facts of a Llama with two layers; `fields` override its configuration and can make it another architecture.

    It has no weights: `srv.testing.conformance.small` writes them.
    """
    hidden = heads * head_dim
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": END_TOKEN,
        "tie_word_embeddings": False,
        **fields,
    }
    per_layer = hidden * (2 * heads + 2 * kv_heads) * head_dim + 6 * hidden * hidden + 2 * hidden
    parameters = LAYERS * per_layer + (2 * VOCABULARY + 1) * hidden
    group = FullAttention(tuple(range(LAYERS)), kv_heads, head_dim, head_dim)
    return ModelFacts(
        name="conformance",
        path="conformance",
        format="safetensors",
        architecture=config["architectures"][0],
        config=config,
        dtype=dtype,
        quantization=quantization,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        layers=LAYERS,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        parameters=parameters,
        weight_bytes=parameters * (4 if dtype == "float32" else 2),
        cache_groups=(group,),
        end_tokens=(END_TOKEN,),
    )
