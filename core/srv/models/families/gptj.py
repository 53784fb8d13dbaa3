"""GPT-J: parallel layers, and rotary embeddings of the first dimensions of each head, in adjacent pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import PermuteRotary, Rename, Skip
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.layers.rope_config import DEFAULT_THETA, RopeConfig
from srv.models.unsupported import UnsupportedConfig

NAMES = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "context": ("max_position_embeddings", "n_positions"),
}


def tree(config: Mapping[str, Any]) -> Part:
    inner = config.get("n_inner")
    sizes = layer_norm.sizes(
        config,
        names=NAMES,
        intermediate=None if inner is None else int(inner),
        norm_eps=float(config["layer_norm_epsilon"]),
        rotary=False,
    )
    rotary_dim = config["rotary_dim"]
    if not isinstance(rotary_dim, int) or not 0 < rotary_dim <= sizes.head_dim or rotary_dim % 2:
        raise UnsupportedConfig(f"rotary_dim = {rotary_dim!r} of {sizes.head_dim} is not an even number of dimensions")
    context = layer_norm.first_set_field(config, NAMES["context"])
    return layer_norm.decoder(
        sizes,
        parts.attention(sizes, rope=RopeConfig(DEFAULT_THETA, rotary_dim, "default", context, context, {})),
        parts.mlp(sizes, True, layer_norm.activation(config, "activation_function")),
        order="parallel",
        separate_norms=False,
        output_bias=True,
    )


ARCHITECTURE = Architecture(
    name="GPTJForCausalLM",
    tree=tree,
    defaults={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "n_positions": 2048,
        "rotary_dim": 64,
        "tie_word_embeddings": False,
        "vocab_size": 50400,
    },
    weights=(
        Rename(
            prefix="transformer.",
            names={
                "wte": "model.embed_tokens",
                "ln_f": "model.norm",
                "h.*.ln_1": "model.layers.*.input_layernorm",
                "h.*.attn.q_proj": "model.layers.*.self_attn.q_proj",
                "h.*.attn.k_proj": "model.layers.*.self_attn.k_proj",
                "h.*.attn.v_proj": "model.layers.*.self_attn.v_proj",
                "h.*.attn.out_proj": "model.layers.*.self_attn.o_proj",
                "h.*.mlp.fc_in": "model.layers.*.mlp.up_proj",
                "h.*.mlp.fc_out": "model.layers.*.mlp.down_proj",
            },
        ),
        Skip(("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")),  # masks of old checkpoints
        PermuteRotary(lambda config: int(config["rotary_dim"])),
    ),
    runs_through_transformers=False,
)
