"""Bamba: Mamba-2 in most layers, attention with half of each head rotated in the others. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout, state_space_names
from srv.models.checkpoints.rules import PermuteRotary, Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.builders.mamba import GGUF_FIELDS, MAMBA_DEFAULTS, mamba_of_gguf, mamba_sizes, state_space
from srv.models.unsupported import UnsupportedConfig


def tree(config: Mapping[str, Any]) -> Part:
    """transformers rotates half of each head, whatever `partial_rotary_factor` says."""
    sizes = decoder_sizes({**config, "partial_rotary_factor": 0.5}, reads=("partial_rotary_factor",))
    bias, stated = bool(config["attention_bias"]), set(config["attn_layer_indices"] or ())
    attends = [index in stated for index in range(sizes.layers)]
    if not any(attends):
        raise UnsupportedConfig(f"attn_layer_indices = {sorted(stated)} names no layer with attention")
    mlp = parts.mlp(sizes, bool(config["mlp_bias"]))
    attention = parts.attention(sizes, bias=bias)
    inner = int(config["mamba_expand"] * sizes.hidden_size)
    mamba = state_space(mamba_sizes(config, inner), sizes.hidden_size, sizes.norm_eps)
    mixers = [attention if each else mamba for each in attends]
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, mixers, mlp))


# The names of weights in Bamba and Falcon-H1.
STORED = (
    Rename(parts={"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"}),
)


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["gguf_kv_heads"]
    return mamba_of_gguf({**config, "attn_layer_indices": [index for index, count in enumerate(heads) if count]})


ARCHITECTURE = Architecture(
    name="BambaForCausalLM",
    tree=tree,
    defaults={
        **MAMBA_DEFAULTS,
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "attn_layer_indices": None,
        "mlp_bias": False,
    },
    gguf=GGUFLayout(
        "granitehybrid",
        weights=(state_space_names("mamba"), PermuteRotary()),
        fields=GGUF_FIELDS,
        complete=_of_gguf,
    ),
    weights=STORED,
    runs_through_transformers=False,
)
