"""OPT: layers in sequence with biases, and learned positions. 350M, whose norms follow its layers, is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.layer_norm_config import (
    LayerNormConfig,
    LearnedPositions,
    activation,
    sizes,
)
from srv.models.architectures.starcoder2 import NAMES
from srv.models.checkpoints.rules import Rename
from srv.models.layers.rope_config import refuse_unless

FIRST_POSITION = 2
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "do_layer_norm_before": (True,),
    "_remove_final_layer_norm": (False,),
    "layer_norm_elementwise_affine": (True,),
}


def make_config(config: Mapping[str, Any]) -> LayerNormConfig:
    refuse_unless(config, {**SUPPORTED, "word_embed_proj_dim": (config["hidden_size"],)})
    decoder = sizes(config, names=NAMES, intermediate=int(config["ffn_dim"]), norm_eps=1e-5, rotary=False)
    bias = bool(config["enable_bias"])
    return LayerNormConfig(
        decoder=decoder.replace(qkv_bias=bias, output_bias=bias, mlp_bias=bias),
        mlp=activation(config, "activation_function"),
        learned=LearnedPositions(decoder.rope.context_length + FIRST_POSITION, FIRST_POSITION),
    )


ARCHITECTURE = Architecture(
    name="OPTForCausalLM",
    make_config=make_config,
    defaults={
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "enable_bias": True,
    },
    weights=(
        Rename(
            prefix="model.decoder.",
            names={
                "embed_tokens": "model.embed_tokens",
                "embed_positions": "model.embed_positions",
                "final_layer_norm": "model.norm",
                "layers.*.self_attn.q_proj": "model.layers.*.self_attn.q_proj",
                "layers.*.self_attn.k_proj": "model.layers.*.self_attn.k_proj",
                "layers.*.self_attn.v_proj": "model.layers.*.self_attn.v_proj",
                "layers.*.self_attn.out_proj": "model.layers.*.self_attn.o_proj",
                "layers.*.self_attn_layer_norm": "model.layers.*.input_layernorm",
                "layers.*.final_layer_norm": "model.layers.*.post_attention_layernorm",
                "layers.*.fc1": "model.layers.*.mlp.up_proj",
                "layers.*.fc2": "model.layers.*.mlp.down_proj",
            },
        ),
    ),
)
