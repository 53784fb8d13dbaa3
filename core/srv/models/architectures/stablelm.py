"""StableLM: Llama with LayerNorm, rotary embeddings of a part of each head, and optionally parallel layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.layer_norm_config import LayerNormConfig, sizes
from srv.models.layers.rope_config import refuse_unless

NAMES = {
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "context": ("max_position_embeddings",),
}


def make_config(config: Mapping[str, Any]) -> LayerNormConfig:
    refuse_unless(config, {"hidden_act": ("silu",)})
    decoder = sizes(
        config,
        names=NAMES,
        intermediate=int(config["intermediate_size"]),
        kv_heads=int(config["num_key_value_heads"]),
        norm_eps=float(config["layer_norm_eps"]),
    )
    parallel = bool(config["use_parallel_residual"])
    return LayerNormConfig(
        decoder=decoder.replace(qkv_bias=bool(config["use_qkv_bias"])),
        mlp="silu_gated",
        parallel=parallel,
        separate_norms=not parallel,
        head_norms=bool(config["qk_layernorm"]),
    )


ARCHITECTURE = Architecture(
    name="StableLmForCausalLM",
    make_config=make_config,
    defaults={
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "qk_layernorm": False,
        "tie_word_embeddings": False,
        "use_parallel_residual": False,
        "use_qkv_bias": False,
    },
)
