"""Bamba: Mamba-2 in most layers, attention with half of each head rotated in the others. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import decoder_config
from srv.models.architectures.mamba_config import MAMBA_DEFAULTS, MambaConfig, mamba_sizes
from srv.models.checkpoints.rules import Rename
from srv.models.layers.rope_config import UnsupportedConfig


def make_config(config: Mapping[str, Any]) -> MambaConfig:
    """transformers rotates half of each head, whatever `partial_rotary_factor` says."""
    base = decoder_config({**config, "partial_rotary_factor": 0.5}, reads=("partial_rotary_factor",))
    bias, stated = bool(config["attention_bias"]), set(config["attn_layer_indices"] or ())
    attends = tuple(index in stated for index in range(base.layers))
    if not any(attends):
        raise UnsupportedConfig(f"attn_layer_indices = {sorted(stated)} names no layer with attention")
    decoder = base.replace(qkv_bias=bias, output_bias=bias, mlp_bias=bool(config["mlp_bias"]))
    return MambaConfig(decoder, attends, mamba_sizes(config, int(config["mamba_expand"] * base.hidden_size)))


# The names of weights in Bamba and Falcon-H1.
STORED = (
    Rename(parts={"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"}),
)
ARCHITECTURE = Architecture(
    name="BambaForCausalLM",
    make_config=make_config,
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
    weights=STORED,
)
