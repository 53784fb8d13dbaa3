"""Grok 2: capped scores that grow with the position, capped logits of routers, and an MLP beside the experts.

Torch-free. The sum of MLP and experts is divided by the square root of 2. Experts' matrices are stored as the parts of
eight ranks. transformers has no such class: the formulas are those of SGLang (`grok.py` and its attention kernels),
with which xAI publishes the model. There, GELU is the exact one; Grok 1's code, the port of Grok 2 to JAX and llama.cpp
have the approximation by tanh, which JAX's `gelu` is and which is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srv.models.blueprint import Layer, MoE, Norm, Part
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes, soft_cap
from srv.models.families.builders.layer_types import check_experts
from srv.models.layers.moe_config import COUNT_FIELDS, Routing
from srv.models.unsupported import InvalidConfig, refuse_unless

SCORES, LOGITS, ROUTER = "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"
TEMPERATURE = "attn_temperature_len"
# "original" is the rotary embedding without a scaling, whatever the other fields of one are.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "rope_type": ("original",),
    "rope_rotate_half_dims": (False,),
    "attn_logit_softcapping_method": ("tanh",),
    "sliding_window_size": (-1, 0),
    "global_attn_every_n": (1,),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    sizes = decoder_sizes({**config, "hidden_act": "silu"}, reads=(*COUNT_FIELDS, SCORES, LOGITS))
    attention = parts.attention(sizes, soft_cap=soft_cap(config, SCORES))
    attention = replace(attention, temperature_from=_temperature_from(config))

    def norm(name: str, adds: bool = False) -> Norm:
        return Norm(sizes.hidden_size, sizes.norm_eps, adds=adds, name=name)

    before, after = (norm(parts.BEFORE_MIXER, adds=True),), (norm("post_feedforward_layernorm"),)
    between = norm(parts.BEFORE_MLP), norm("pre_feedforward_layernorm", adds=True)
    layer = Layer(before, (attention,), between, _experts(config, sizes), after)
    scale = float(config["output_multiplier_scale"])
    if not scale > 0:
        raise InvalidConfig(f"output_multiplier_scale = {scale} is not a positive number")
    return parts.decoder(
        sizes,
        (layer,) * sizes.layers,
        factor=float(config["embedding_multiplier_scale"]),
        logits_divisor=1 / scale,
        logits_soft_cap=soft_cap(config, LOGITS),
    )


def _temperature_from(config: Mapping[str, Any]) -> int | None:
    """None and numbers below 1 are none."""
    first = config[TEMPERATURE]
    if first is None or first < 1:
        return None
    if first == 1:
        raise InvalidConfig(f"{TEMPERATURE} = {first!r} is not a number of tokens above 1")
    return int(first)


def _experts(config: Mapping[str, Any], sizes: Sizes) -> MoE:
    """The experts of a layer, and beside them an MLP for every token, unless `residual_moe` is false."""
    count, used = int(config["num_local_experts"]), int(config["num_experts_per_tok"])
    check_experts(used, count)
    inner, residual = int(config["moe_intermediate_size"] or sizes.intermediate_size), bool(config["residual_moe"])
    shared = sizes.intermediate_size if residual else 0
    made = parts.mixture(
        sizes, count, inner, Routing(used), shared=shared, activation="gelu_tanh", shared_activation="gelu_tanh_gated"
    )
    factor = 1 / math.sqrt(2) if residual else 1.0
    return replace(made, logits_soft_cap=soft_cap(config, ROUTER), factor=factor)


_LAYER = {
    "pre_attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "pre_moe_norm": "pre_feedforward_layernorm",
    "post_moe_norm": "post_feedforward_layernorm",
    "block_sparse_moe.gate": "mlp.gate",
    "mlp.gate_proj": "mlp.shared_expert.gate_proj",
    "mlp.up_proj": "mlp.shared_expert.up_proj",
    "mlp.down_proj": "mlp.shared_expert.down_proj",
}
ARCHITECTURE = Architecture(
    name="Grok1ForCausalLM",
    tree=tree,
    # Where a configuration leaves out a field, those of SGLang.
    defaults={
        **DEFAULTS,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        SCORES: 30.0,
        ROUTER: 30.0,
        LOGITS: None,
        TEMPERATURE: None,
        "moe_intermediate_size": None,
        "residual_moe": False,
        "embedding_multiplier_scale": 1.0,
        "output_multiplier_scale": 1.0,
    },
    model_type="grok-1",
    weights=(
        Rename({f"model.layers.*.{stored}": f"model.layers.*.{name}" for stored, name in _LAYER.items()}),
        Rename(
            parts={"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}, within="experts"
        ),
    ),
    runs_through_transformers=False,
)
