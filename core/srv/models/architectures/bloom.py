"""Bloom: layers in sequence, positions by ALiBi, and a norm after the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.falcon import ARCHITECTURE as FALCON
from srv.models.architectures.layer_norm_config import LayerNormConfig, alibi_slopes, sizes
from srv.models.checkpoints.rules import Rename
from srv.models.layers.rope_config import refuse_unless

NAMES = {
    "hidden": ("hidden_size", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "context": ("seq_length",),
}


def make_config(config: Mapping[str, Any]) -> LayerNormConfig:
    refuse_unless(config, {"slow_but_exact": (False,)})
    decoder = sizes(config, names=NAMES, norm_eps=float(config["layer_norm_epsilon"]), rotary=False)
    return LayerNormConfig(
        decoder=decoder.replace(
            qkv_bias=True, output_bias=True, mlp_bias=True, alibi_slopes=alibi_slopes(decoder.heads)
        ),
        mlp="gelu_tanh",
        embedding_norm=True,
        residual_of_norm=bool(config["apply_residual_connection_post_layernorm"]),
    )


assert FALCON.weights is not None
ARCHITECTURE = Architecture(
    name="BloomForCausalLM",
    make_config=make_config,
    defaults={
        "apply_residual_connection_post_layernorm": False,
        "layer_norm_epsilon": 1e-5,
        "n_embed": 64,
        "n_layer": 2,
        "n_head": 8,
        "seq_length": 2048,
        "tie_word_embeddings": True,
        "vocab_size": 250880,
    },
    weights=(
        *FALCON.weights,
        Rename(prefix="transformer.", names={"word_embeddings_layernorm": "model.embed_norm"}),
    ),
)
