"""MPT: layers in sequence without biases, and positions by ALiBi.

Variants of the original code that transformers does not compute are refused by the name of the field, as are clipped
queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import QKV, Rename, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.unsupported import UnsupportedConfig, refuse_unless

NAMES = {
    "hidden": ("hidden_size", "d_model"),
    "layers": ("num_hidden_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_heads"),
    "context": ("max_seq_len",),
}
SUPPORTED: dict[str, tuple[Any, ...]] = {"expansion_ratio": (4,), "logit_scale": (), "no_bias": (True,)}
SUPPORTED_ATTENTION: dict[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention",),
    "clip_qkv": (),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}


def tree(config: Mapping[str, Any]) -> Part:
    attention = config.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise UnsupportedConfig(f"attn_config = {attention!r} is not an object")
    refuse_unless(config, SUPPORTED)
    refuse_unless(attention, SUPPORTED_ATTENTION, "attn_config.")
    sizes = layer_norm.sizes(config, names=NAMES, norm_eps=float(config["layer_norm_epsilon"]), rotary=False)
    stated = attention.get("softmax_scale")
    scale = None if stated is None else float(stated)
    mixer = parts.attention(sizes, scale=scale, alibi=_slopes(sizes.heads))
    return layer_norm.decoder(sizes, mixer, parts.mlp(sizes, activation="gelu"), norm_bias=False)


def _slopes(heads: int) -> tuple[float, ...]:
    """As `alibi_slopes`, but if the number of heads is not a power of two, slopes for the next larger one.

    They are then every other one from the second, followed by the rest.
    """
    slopes = layer_norm.alibi_slopes(1 << (heads - 1).bit_length())
    return slopes if len(slopes) == heads else (slopes[1::2] + slopes[::2])[:heads]


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """A bound of 0 is none."""
    attention = {"alibi": True, "alibi_bias_max": config["gguf_alibi"], "clip_qkv": config.get("gguf_clip") or None}
    return {**config, "attn_config": attention, "num_key_value_heads": None}


ARCHITECTURE = Architecture(
    name="MptForCausalLM",
    tree=tree,
    defaults={
        "layer_norm_epsilon": 1e-5,
        "d_model": 2048,
        "n_layers": 24,
        "n_heads": 16,
        "max_seq_len": 2048,
        "tie_word_embeddings": True,
        "vocab_size": 50368,
    },
    gguf=GGUFLayout(
        "mpt",
        fields={"context_length": "max_seq_len", "attention.max_alibi_bias": "gguf_alibi"},
        optional_fields={
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "attention.clamp_kqv": "gguf_clip",
        },
        complete=_of_gguf,
    ),
    weights=(
        Rename(
            prefix="transformer.",
            names={
                "wte": "model.embed_tokens",
                "norm_f": "model.norm",
                "blocks.*.norm_1": "model.layers.*.input_layernorm",
                "blocks.*.norm_2": "model.layers.*.post_attention_layernorm",
                "blocks.*.attn.Wqkv": "model.layers.*.self_attn.query_key_value",
                "blocks.*.attn.out_proj": "model.layers.*.self_attn.o_proj",
                "blocks.*.ffn.up_proj": "model.layers.*.mlp.up_proj",
                "blocks.*.ffn.down_proj": "model.layers.*.mlp.down_proj",
            },
        ),
        Split("self_attn.query_key_value", QKV),
    ),
    runs_through_transformers=False,
    published_names=("MPTForCausalLM",),
)
