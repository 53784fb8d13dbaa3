"""Falcon: parallel layers with one key head or few, or layers in sequence, with rotary embeddings or ALiBi.

transformers rounds the biases of ALiBi to bfloat16, those of later keys by several units, and its "eager" attention
adds them twice. Here they are exact; with its "sdpa" attention, the two are equal in the first 256 tokens if the number
of heads is a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout, layer_names
from srv.models.checkpoints.rules import QKV, Permute, Rename, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.unsupported import UnsupportedConfig

NAMES = {
    "hidden": ("hidden_size", "n_embed"),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "context": ("max_position_embeddings",),
}


def tree(config: Mapping[str, Any]) -> Part:
    grouped, parallel = bool(config["new_decoder_architecture"]), bool(config["parallel_attn"])
    norms = config.get("num_ln_in_parallel_attn") or (2 if grouped else 1)
    if norms not in ((1, 2) if grouped else (1,)) or (grouped and not parallel):
        fields = {name: config.get(name) for name in ("new_decoder_architecture", "parallel_attn")}
        raise UnsupportedConfig(f"num_ln_in_parallel_attn = {norms!r} with {fields} is not implemented natively")
    inner, bias, alibi = config.get("ffn_hidden_size"), bool(config["bias"]), bool(config["alibi"])
    sizes = layer_norm.sizes(
        config,
        names=NAMES,
        intermediate=None if inner is None else int(inner),
        kv_heads=_kv_heads(config),
        norm_eps=float(config["layer_norm_epsilon"]),
        rotary=not alibi,
    )
    scale = sizes.head_dim**-0.5  # of scores and biases alike
    slopes = tuple(slope * scale for slope in layer_norm.alibi_slopes(sizes.heads)) if alibi else None
    return layer_norm.decoder(
        sizes,
        parts.attention(sizes, bias=bias, alibi=slopes),
        parts.mlp(sizes, bias, layer_norm.activation(config, "activation")),
        order="parallel" if parallel else "sequence",
        separate_norms=not parallel or norms == 2,
    )


def _kv_heads(config: Mapping[str, Any]) -> int | None:
    if config["new_decoder_architecture"]:
        return config.get("num_kv_heads")
    return 1 if config["multi_query"] else None


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Only models with few key heads have a norm for each part of a layer."""
    grouped, two = config["num_kv_heads"] > 1, config["gguf_two_norms"]
    return {**config, "new_decoder_architecture": grouped, "num_ln_in_parallel_attn": 2 if two else 1}


ARCHITECTURE = Architecture(
    name="FalconForCausalLM",
    tree=tree,
    defaults={
        "activation": "gelu",
        "alibi": False,
        "bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "model_type": "falcon",
        "multi_query": True,
        "vocab_size": 65024,
        "n_embed": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "tie_word_embeddings": True,
    },
    gguf=GGUFLayout(
        "falcon",
        weights=(layer_names({"attn_qkv": "self_attn.query_key_value"}), Split("self_attn.query_key_value", QKV)),
        fields={"attention.layer_norm_epsilon": "layer_norm_epsilon", "attention.head_count_kv": "num_kv_heads"},
        sizes={"ffn_hidden_size": ("blk.0.ffn_up.weight", 0)},
        present={"gguf_two_norms": "blk.0.attn_norm_2.weight"},
        rules_if={
            "gguf_two_norms": (
                layer_names({"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}),
            )
        },
        complete=_of_gguf,
    ),
    weights=(
        Rename(
            prefix="transformer.",
            names={
                "word_embeddings": "model.embed_tokens",
                "ln_f": "model.norm",
                "h.*.input_layernorm": "model.layers.*.input_layernorm",
                "h.*.ln_attn": "model.layers.*.input_layernorm",
                "h.*.ln_mlp": "model.layers.*.post_attention_layernorm",
                "h.*.post_attention_layernorm": "model.layers.*.post_attention_layernorm",
                "h.*.self_attention.query_key_value": "model.layers.*.self_attn.query_key_value",
                "h.*.self_attention.dense": "model.layers.*.self_attn.o_proj",
                "h.*.mlp.dense_h_to_4h": "model.layers.*.mlp.up_proj",
                "h.*.mlp.dense_4h_to_h": "model.layers.*.mlp.down_proj",
            },
        ),
        Split("self_attn.query_key_value", QKV),
        Permute("self_attn.query_key_value", "kv_heads"),
    ),
    runs_through_transformers=False,
)
