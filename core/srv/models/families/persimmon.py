"""Persimmon: layer norms, also of heads, half of each head rotated, and MLPs with squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Norm, Part
from srv.models.checkpoints.rules import QKV, Permute, Rename, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes


def tree(config: Mapping[str, Any]) -> Part:
    stated = {**config, "rms_norm_eps": config["layer_norm_eps"], "num_key_value_heads": config["num_attention_heads"]}
    sizes = decoder_sizes(stated, reads=("hidden_act", "partial_rotary_factor"))
    norms = _head_norms(sizes) if config["qk_layernorm"] else None
    mlp = parts.mlp(sizes, True, layer_norm.activation(config, "hidden_act"))
    return layer_norm.decoder(sizes, parts.attention(sizes, bias=True, norms=norms), mlp)


def _head_norms(sizes: Sizes) -> tuple[Norm, Norm]:
    """All heads have the same weights and biases."""
    names = ("q_layernorm", "k_layernorm")
    q_norm, k_norm = (Norm(sizes.head_dim, sizes.norm_eps, rms=False, bias=True, name=name) for name in names)
    return q_norm, k_norm


ARCHITECTURE = Architecture(
    name="PersimmonForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 262144,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "hidden_act": "relu2",
        "max_position_embeddings": 16384,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
        "eos_token_id": 2,
    },
    weights=(
        Rename(
            {
                "model.final_layernorm": "model.norm",
                "model.layers.*.self_attn.dense": "model.layers.*.self_attn.o_proj",
                "model.layers.*.mlp.dense_h_to_4h": "model.layers.*.mlp.up_proj",
                "model.layers.*.mlp.dense_4h_to_h": "model.layers.*.mlp.down_proj",
            }
        ),
        Split("self_attn.query_key_value", QKV),
        Permute("self_attn.query_key_value", "kv_heads"),
    ),
)
