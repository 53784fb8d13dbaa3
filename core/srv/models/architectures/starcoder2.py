"""StarCoder 2: layers in sequence with biases, few key heads, rotary embeddings and a window in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import one_window
from srv.models.architectures.layer_norm_config import LayerNormConfig, activation, sizes
from srv.models.checkpoints.rules import Rename

NAMES = {
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "context": ("max_position_embeddings",),
}


def make_config(config: Mapping[str, Any]) -> LayerNormConfig:
    decoder = sizes(
        config,
        names=NAMES,
        intermediate=int(config["intermediate_size"]),
        kv_heads=int(config["num_key_value_heads"]),
        norm_eps=float(config["norm_epsilon"]),
    )
    bias = bool(config["use_bias"])
    return LayerNormConfig(
        decoder=decoder.replace(
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            windows=one_window(config, decoder.layers),
        ),
        mlp=activation(config, "hidden_act"),
    )


ARCHITECTURE = Architecture(
    name="Starcoder2ForCausalLM",
    make_config=make_config,
    defaults={
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "eos_token_id": 50256,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    weights=(
        Rename(
            {
                "model.layers.*.mlp.c_fc": "model.layers.*.mlp.up_proj",
                "model.layers.*.mlp.c_proj": "model.layers.*.mlp.down_proj",
            }
        ),
    ),
)
