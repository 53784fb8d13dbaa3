"""Phi 1 and 2: parallel layers with one norm, biases everywhere, and a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.layer_norm_config import LayerNormConfig, activation, sizes
from srv.models.architectures.starcoder2 import NAMES
from srv.models.checkpoints.rules import Rename
from srv.models.layers.rope_config import refuse_unless


def make_config(config: Mapping[str, Any]) -> LayerNormConfig:
    refuse_unless(config, {"qk_layernorm": (False,)})
    decoder = sizes(
        config,
        names=NAMES,
        intermediate=int(config["intermediate_size"]),
        kv_heads=int(config["num_key_value_heads"]),
        norm_eps=float(config["layer_norm_eps"]),
    )
    return LayerNormConfig(
        decoder=decoder.replace(qkv_bias=True, output_bias=True, mlp_bias=True),
        mlp=activation(config, "hidden_act"),
        parallel=True,
        separate_norms=False,
        logits_bias=True,
    )


ARCHITECTURE = Architecture(
    name="PhiForCausalLM",
    make_config=make_config,
    defaults={
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    weights=(
        Rename(
            {
                "model.final_layernorm": "model.norm",
                "model.layers.*.self_attn.dense": "model.layers.*.self_attn.o_proj",
                "model.layers.*.mlp.fc1": "model.layers.*.mlp.up_proj",
                "model.layers.*.mlp.fc2": "model.layers.*.mlp.down_proj",
            }
        ),
    ),
)
