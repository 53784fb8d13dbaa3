"""XGLM: layers in sequence, and sinusoidal positions that are added to the embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part, Sinusoids
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.unsupported import refuse_unless

NAMES = {
    "hidden": ("hidden_size", "d_model"),
    "layers": ("num_hidden_layers", "num_layers"),
    "heads": ("num_attention_heads", "attention_heads"),
    "context": ("max_position_embeddings",),
}
FIRST_POSITION = 2  # of a sequence


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"add_cross_attention": (False,)})
    sizes = layer_norm.sizes(config, names=NAMES, intermediate=int(config["ffn_dim"]), norm_eps=1e-5, rotary=False)
    return layer_norm.decoder(
        sizes,
        parts.attention(sizes, bias=True),
        parts.mlp(sizes, True, layer_norm.activation(config, "activation_function")),
        before=(Sinusoids(sizes.hidden_size, FIRST_POSITION),),
        factor=sizes.hidden_size**0.5 if config["scale_embedding"] else 1.0,
    )


ARCHITECTURE = Architecture(
    name="XGLMForCausalLM",
    tree=tree,
    defaults={
        "activation_function": "gelu",
        "d_model": 1024,
        "num_layers": 24,
        "attention_heads": 16,
        "ffn_dim": 4096,
        "max_position_embeddings": 2048,
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "vocab_size": 256008,
    },
    weights=(
        Rename(
            prefix="model.",
            names={
                "embed_tokens": "model.embed_tokens",
                "layer_norm": "model.norm",
                "layers.*.self_attn_layer_norm": "model.layers.*.input_layernorm",
                "layers.*.final_layer_norm": "model.layers.*.post_attention_layernorm",
                "layers.*.self_attn.out_proj": "model.layers.*.self_attn.o_proj",
                "layers.*.fc1": "model.layers.*.mlp.up_proj",
                "layers.*.fc2": "model.layers.*.mlp.down_proj",
            },
        ),
    ),
    runs_through_transformers=False,
)
