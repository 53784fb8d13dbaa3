"""Baichuan and Baichuan 2: Llama with a fused projection. Published with its code; transformers has no class.

The models of 7B have rotary embeddings and the field `max_position_embeddings`; those of 13B have ALiBi, and state the
context as `model_max_length` alone. Baichuan 2 divides each row of its output layer by its norm ("NormHead"); no field
says so, but its vocabulary is another one (arXiv:2309.10305).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import QKV, Split, UnitRows
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes

ROTATED = "max_position_embeddings"
FIRST_VOCABULARY = 64000  # of the models before Baichuan 2


def tree(config: Mapping[str, Any]) -> Part:
    rotated = config.get(ROTATED) is not None
    sizes = decoder_sizes(config if rotated else {**config, ROTATED: config["model_max_length"]})
    alibi = None if rotated else layer_norm.alibi_slopes(sizes.heads)
    attention = parts.attention(sizes, rotated=rotated, alibi=alibi)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes)))


def has_unit_rows(config: Mapping[str, Any]) -> bool:
    return int(config["vocab_size"]) != FIRST_VOCABULARY


ARCHITECTURE = Architecture(
    name="BaichuanForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 125696,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "model_max_length": 4096,
        "eos_token_id": 2,
    },
    weights=(Split("self_attn.W_pack", QKV), UnitRows("lm_head", has_unit_rows)),
    published_names=("BaiChuanForCausalLM",),
)
