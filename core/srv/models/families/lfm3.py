"""LFM3: the facts of an LFM2 with sliding windows, a gate per head of attention, and norms after each part of a layer.

Layers with a window have a rotary embedding of their own. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from srv.models.blueprint import Attention, Layer, Norm, Part, alike
from srv.models.blueprint.recurrent import ShortConvolution
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.builders.layer_types import ATTENTION, SLIDING, has_attention
from srv.models.families.builders.sandwich import local_rope, with_rope_of
from srv.models.families.lfm2 import convolution
from srv.models.unsupported import UnsupportedConfig

KINDS = (ATTENTION, SLIDING, "conv")
OUTPUT_NORMS = ("post_operator_norm", "post_ffn_norm")
ROPE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        ATTENTION: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    }
)


def default_kind(index: int) -> str:
    """The kind of a layer, if `layer_types` is left out."""
    if index % 4 == 2:
        return ATTENTION
    return SLIDING if index % 4 == 0 and index > 0 else "conv"


def tree(config: Mapping[str, Any]) -> Part:
    count, types = int(config["num_hidden_layers"]), config.get("layer_types")
    types = [default_kind(index) for index in range(count)] if types is None else types
    has_attention(types, KINDS, count)
    read = {**config, "rms_norm_eps": config["norm_eps"], "rope_parameters": config.get("rope_parameters") or ROPE}
    for kind in dict.fromkeys(types):
        if kind != "conv" and kind not in read["rope_parameters"]:
            raise UnsupportedConfig(f"rope_parameters has no {kind}, which layers have")
    full = with_rope_of(read, ATTENTION, "rope_theta")
    sizes, bias, window = decoder_sizes(full), bool(config["attention_bias"]), config["sliding_window"]
    if SLIDING in types and (window is None or window < 1):
        raise UnsupportedConfig(f"sliding_window = {window!r} of layers of {SLIDING} is not a number of tokens")
    norms, head_gates = parts.head_norms(sizes), bool(config["use_attention_gate"])
    local = local_rope(read, sizes.head_dim, "rope_theta") if SLIDING in types else None
    mlp, output_norms = parts.mlp(sizes), bool(config["use_sandwich_norm"])

    def mixer(kind: str) -> Attention | ShortConvolution:
        if kind == "conv":
            return convolution(config, sizes.hidden_size)
        rope, slides = (local, int(window)) if kind == SLIDING else (None, None)
        return parts.attention(sizes, bias=bias, norms=norms, rope=rope, window=slides, head_gates=head_gates)

    def layer(kind: str) -> Layer:
        made = parts.pre_norm(sizes, mixer(kind), mlp)
        after, last = (Norm(sizes.hidden_size, sizes.norm_eps, name=name) for name in OUTPUT_NORMS)
        return replace(made, between=(after, *made.between), after=(last,)) if output_norms else made

    return parts.decoder(sizes, alike(types, layer))


ARCHITECTURE = Architecture(
    name="Lfm3ForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 128000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "conv_bias": False,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "eos_token_id": 124900,
    },
    weights=(
        Rename(
            {
                "model.embedding_norm": "model.norm",
                "model.layers.*.self_attn.g_proj": "model.layers.*.self_attn.gate_proj",  # transformers' own name
                "model.layers.*.operator_norm": "model.layers.*.input_layernorm",
                "model.layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
            },
            parts={"feed_forward": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
        ),
    ),
    runs_through_transformers=False,
)
