"""Jamba: Mamba, attention in some layers, and experts in some. Its sizes alone are known. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Norm, Part, alike
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import EPS, common, experts, mamba1, sizes

PRE_FF_NORMS = ("input_layernorm", "pre_ff_layernorm")


def jamba(c: Mapping[str, Any]) -> Part:
    """Attention in every eighth layer and experts in every second one, by default."""
    base, state = sizes(c), c["mamba_d_state"]
    rank = math.ceil(c["hidden_size"] / 16) if c["mamba_dt_rank"] == "auto" else c["mamba_dt_rank"]
    norms = (Norm(rank, EPS, name="dt_layernorm"), *(Norm(state, EPS, name=f"{each}_layernorm") for each in "bc"))
    recurrent = mamba1(
        c, "mamba", inner=c["mamba_expand"] * c["hidden_size"], state=state, rank=rank, width=c["mamba_d_conv"],
        conv_bias=c["mamba_conv_bias"], bias=c["mamba_proj_bias"], norms=norms,
    )  # fmt: skip
    attention, inner, used = parts.attention(base), base.intermediate_size, c["num_experts_per_tok"]
    dense = parts.mlp(base, name="feed_forward")
    sparse = experts(base, c["num_experts"], inner, used, router="router", name="feed_forward")
    layers = [
        (
            index % c["attn_layer_period"] == c["attn_layer_offset"],
            c["num_experts"] > 1 and index % c["expert_layer_period"] == c["expert_layer_offset"],
        )
        for index in range(base.layers)
    ]

    def layer(kind: tuple[bool, bool]) -> Part:
        attends, is_sparse = kind
        mixer = attention if attends else recurrent
        return parts.pre_norm(base, mixer, sparse if is_sparse else dense, names=PRE_FF_NORMS)

    return parts.decoder(base, alike(layers, layer))


ARCHITECTURE = Architecture(
    name="JambaForCausalLM",
    tree=jamba,
    defaults=common(
        65536,
        4096,
        14336,
        32,
        32,
        8,
        262144,
        num_experts=16,
        num_experts_per_tok=2,
        attn_layer_offset=4,
        attn_layer_period=8,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_conv_bias=True,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_dt_rank="auto",
        mamba_expand=2,
        mamba_proj_bias=False,
    ),
    layers=None,
    model_type="jamba",
    names={"num_local_experts": "num_experts"},
    runs_through_transformers=False,
)
