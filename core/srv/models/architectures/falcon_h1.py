"""Falcon-H1: attention and Mamba-2 side by side in every layer, with constants that multiply most results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.bamba import STORED
from srv.models.architectures.decoder_config import decoder_config
from srv.models.architectures.mamba_config import MAMBA_DEFAULTS, LayerFactors, MambaConfig, mamba_sizes
from srv.models.layers.rope_config import UnsupportedConfig


def make_config(config: Mapping[str, Any]) -> MambaConfig:
    base, bias = decoder_config(config, reads=("embedding_multiplier",)), bool(config["attention_bias"])
    head = float(config["lm_head_multiplier"])
    if not head > 0:
        raise UnsupportedConfig(f"lm_head_multiplier = {head} is not a positive number")
    decoder = base.replace(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config["mlp_bias"]),
        attention_scale=base.attention_scale * float(config["key_multiplier"]),
        embedding_multiplier=float(config["embedding_multiplier"]),
        logits_divisor=1 / head,
    )
    inner = config["mamba_d_ssm"] or int(config["mamba_expand"] * base.hidden_size)
    mamba = mamba_sizes(config, int(inner))._replace(
        output_bias=bool(config["projectors_bias"]),
        norm=bool(config["mamba_rms_norm"]),
        norm_first=bool(config["mamba_norm_before_gate"]),
    )
    return MambaConfig(decoder, (True,) * base.layers, mamba, parallel=True, factors=_factors(config))


def _factors(config: Mapping[str, Any]) -> LayerFactors:
    projected = tuple(map(float, config["ssm_multipliers"] or (1.0,) * 5))
    gate, mlp_out = map(float, config["mlp_multipliers"] or (1.0, 1.0))
    if len(projected) != 5:
        raise UnsupportedConfig(f"ssm_multipliers has {len(projected)} values and not 5")
    return LayerFactors(
        float(config["ssm_in_multiplier"]),
        projected,
        float(config["ssm_out_multiplier"]),
        float(config["attention_in_multiplier"]),
        float(config["attention_out_multiplier"]),
        gate,
        mlp_out,
    )


_SCALARS = (
    *("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    *("attention_in_multiplier", "attention_out_multiplier"),
)
ARCHITECTURE = Architecture(
    name="FalconH1ForCausalLM",
    make_config=make_config,
    defaults={
        **MAMBA_DEFAULTS,
        **dict.fromkeys(_SCALARS, 1.0),
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "projectors_bias": False,
        "mlp_multipliers": None,
        "ssm_multipliers": None,
    },
    model_type="falcon_h1",
    weights=STORED,
)
