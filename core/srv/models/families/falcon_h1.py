"""Falcon-H1: attention and Mamba-2 side by side in every layer, with constants that multiply most results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout, layer_names, state_space_names
from srv.models.families.architecture import Architecture
from srv.models.families.bamba import STORED
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.builders.mamba import GGUF_FIELDS, MAMBA_DEFAULTS, mamba_of_gguf, mamba_sizes, state_space
from srv.models.unsupported import UnsupportedConfig


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config, reads=("embedding_multiplier",)), bool(config["attention_bias"])
    head = float(config["lm_head_multiplier"])
    if not head > 0:
        raise UnsupportedConfig(f"lm_head_multiplier = {head} is not a positive number")
    mlp, scale = parts.mlp(sizes, bool(config["mlp_bias"])), sizes.head_dim**-0.5 * float(config["key_multiplier"])
    attention = parts.attention(sizes, bias=bias, scale=scale)
    factor = float(config["embedding_multiplier"])
    inner = config["mamba_d_ssm"] or int(config["mamba_expand"] * sizes.hidden_size)
    mamba = mamba_sizes(config, int(inner))._replace(
        output_bias=bool(config["projectors_bias"]),
        norm=bool(config["mamba_rms_norm"]),
        norm_first=bool(config["mamba_norm_before_gate"]),
    )
    projected = tuple(map(float, config["ssm_multipliers"] or (1.0,) * 5))
    gate, down = map(float, config["mlp_multipliers"] or (1.0, 1.0))
    if len(projected) != 5:
        raise UnsupportedConfig(f"ssm_multipliers has {len(projected)} values and not 5")
    mixers = (state_space(mamba, sizes.hidden_size, sizes.norm_eps, projected), attention)
    of_mamba, of_attention = (
        (float(config[f"{name}_in_multiplier"]), float(config[f"{name}_out_multiplier"]))
        for name in ("ssm", "attention")
    )
    layer = parts.pre_norm(sizes, attention, replace(mlp, gate_factor=gate, factor=down))
    layer = replace(layer, mixers=mixers, scales=(of_mamba, of_attention))
    return parts.decoder(sizes, (layer,) * sizes.layers, factor=factor, logits_divisor=1 / head)


_SCALARS = (
    *("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    *("attention_in_multiplier", "attention_out_multiplier"),
)


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """The constants have been multiplied into the weights."""
    inner = config["gguf_inner"]
    return mamba_of_gguf({**config, "mamba_d_ssm": inner, "mamba_norm_before_gate": False})


ARCHITECTURE = Architecture(
    name="FalconH1ForCausalLM",
    tree=tree,
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
    gguf=GGUFLayout(
        "falcon-h1",
        weights=(state_space_names("mamba"), layer_names({"ffn_norm": "post_attention_layernorm.weight"})),
        fields=GGUF_FIELDS,
        present={
            "mamba_rms_norm": "blk.0.ssm_norm.weight",
            "mamba_conv_bias": "blk.0.ssm_conv1d.bias",
            "mamba_proj_bias": "blk.0.ssm_in.bias",
            "projectors_bias": "blk.0.ssm_out.bias",
        },
        complete=_of_gguf,
    ),
    model_type="falcon_h1",
    weights=STORED,
    runs_through_transformers=False,
)
