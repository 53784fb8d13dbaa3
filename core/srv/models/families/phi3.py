"""Phi-3 and Phi-4: Llama with fused projections, a partial rotary embedding, LongRoPE and a window in all layers.

LongRoPE is served with one of its two lists of factors, by the served context length (`srv.models.layers.rope_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import FUSED_MLP, GGUFLayout
from srv.models.checkpoints.rules import GATE_UP, QKV, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, one_window


def tree(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(config, reads=("partial_rotary_factor",))
    attention = parts.attention(sizes, window=one_window(config))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes)))


ARCHITECTURE = Architecture(
    name="Phi3ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
    },
    gguf=GGUFLayout(
        "phi3",
        weights=(FUSED_MLP,),
        optional_fields={
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
    ),
    weights=(Split("self_attn.qkv_proj", QKV), Split("mlp.gate_up_proj", GATE_UP)),
)
