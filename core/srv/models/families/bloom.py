"""Bloom: layers in sequence, positions by ALiBi, and a norm after the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.falcon import ARCHITECTURE as FALCON
from srv.models.unsupported import refuse_unless

NAMES = {
    "hidden": ("hidden_size", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "context": ("seq_length",),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"slow_but_exact": (False,)})
    sizes = layer_norm.sizes(config, names=NAMES, norm_eps=float(config["layer_norm_epsilon"]), rotary=False)
    of_norm = config["apply_residual_connection_post_layernorm"]
    return layer_norm.decoder(
        sizes,
        parts.attention(sizes, bias=True, alibi=layer_norm.alibi_slopes(sizes.heads)),
        parts.mlp(sizes, True, "gelu_tanh"),
        order="normed_residual" if of_norm else "sequence",
        before=(layer_norm.norm(sizes, "embed_norm"),),
    )


ARCHITECTURE = Architecture(
    name="BloomForCausalLM",
    tree=tree,
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
    gguf=GGUFLayout(
        "bloom",
        weights=(Rename({"token_embd_norm": "model.embed_norm"}),),
        fields={"attention.layer_norm_epsilon": "layer_norm_epsilon", "context_length": "seq_length"},
    ),
    weights=(
        *FALCON.weights,
        Rename(prefix="transformer.", names={"word_embeddings_layernorm": "model.embed_norm"}),
    ),
    runs_through_transformers=False,
)
