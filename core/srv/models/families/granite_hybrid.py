"""Granite 4: Mamba-2 in most layers, attention in the others; experts and a shared MLP, or that MLP alone.

The constants are those of Granite 3. Models without Mamba-2 layers have this class as well. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import MLP, MoE, Part
from srv.models.checkpoints.gguf_layout import EXPERT_COUNT, EXPERT_FIELDS, GGUFLayout, layer_names, state_space_names
from srv.models.checkpoints.rules import GATE_UP, PermuteRotary, Rename, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.builders.layer_types import ATTENTION, check_experts, has_attention
from srv.models.families.builders.mamba import GGUF_FIELDS, MAMBA_DEFAULTS, mamba_of_gguf, mamba_sizes, state_space
from srv.models.families.granite import CONSTANTS
from srv.models.layers.moe_config import Routing
from srv.models.unsupported import UnsupportedConfig

RECURRENT = "linear_attention"
KINDS = (ATTENTION, RECURRENT)
_FORMER_KINDS = {"attention": ATTENTION, "mamba": RECURRENT}
SHARED_EXPERT = "shared_expert"


def tree(config: Mapping[str, Any]) -> Part:
    """transformers rotates only if `position_embedding_type` is "rope"; published models also say "nope"."""
    sizes = decoder_sizes(config, reads=("num_local_experts", *CONSTANTS.values()))
    types = config["layer_types"] or config.get("layers_block_type") or (RECURRENT,) * sizes.layers
    attends = has_attention([_FORMER_KINDS.get(each, each) for each in types], KINDS, sizes.layers)
    shared, count = int(config["shared_intermediate_size"]), int(config["num_local_experts"] or 0)
    feeding: MLP | MoE
    if count:
        routing = Routing(int(config["num_experts_per_tok"]), renormalize=True)
        check_experts(routing.top_k, count)
        feeding = parts.mixture(
            sizes, count, sizes.intermediate_size, routing, shared=shared, shared_name=SHARED_EXPERT
        )
    else:
        feeding = parts.mlp(sizes, inner=shared, name=f"mlp.{SHARED_EXPERT}")
    if shared <= 0:
        raise UnsupportedConfig(f"shared_intermediate_size = {shared} is not a size")
    attention = parts.attention(
        sizes,
        bias=bool(config["attention_bias"]),
        rotated=config["position_embedding_type"] == "rope",
        scale=float(config["attention_multiplier"]),
    )
    inner = int(config["mamba_expand"] * sizes.hidden_size)
    mamba = state_space(mamba_sizes(config, inner), sizes.hidden_size, sizes.norm_eps)
    mixers = [attention if each else mamba for each in attends]
    return parts.decoder(
        sizes,
        parts.pre_norm_layers(sizes, mixers, feeding, factor=float(config["residual_multiplier"])),
        factor=float(config["embedding_multiplier"]),
        logits_divisor=float(config["logits_scaling"]),
    )


_NAMES = {
    f"model.layers.*.{stored}": f"model.layers.*.{own}"
    for stored, own in (
        ("mlp.router.layer", "mlp.gate"),
        ("mlp.router", "mlp.gate"),
        ("mlp.input_linear.weight", "mlp.experts.gate_up_proj"),
        ("mlp.output_linear.weight", "mlp.experts.down_proj"),
        ("shared_mlp.input_linear", f"mlp.{SHARED_EXPERT}.gate_up_proj"),
        ("shared_mlp.output_linear", f"mlp.{SHARED_EXPERT}.down_proj"),
    )
}
WEIGHTS = (Rename(_NAMES, parts={"block_sparse_moe": "mlp"}), Split(f"mlp.{SHARED_EXPERT}.gate_up_proj", GATE_UP))


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Files of models without experts have the size of the shared MLP as that of the MLP."""
    kinds = [ATTENTION if each else RECURRENT for each in config["gguf_kv_heads"]]
    shared = config.get("shared_intermediate_size") or config["intermediate_size"]
    own = {"layer_types": kinds, "shared_intermediate_size": shared}
    rotated = "rope" if config.get("gguf_rotated") else None
    return mamba_of_gguf({**config, **own, "position_embedding_type": rotated})


ARCHITECTURE = Architecture(
    name="GraniteMoeHybridForCausalLM",
    tree=tree,
    defaults={
        **MAMBA_DEFAULTS,
        **dict.fromkeys(CONSTANTS.values(), 1.0),
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "layer_types": None,
    },
    gguf=GGUFLayout(
        "granitehybrid",
        weights=(
            PermuteRotary(),
            state_space_names("mamba"),
            layer_names({f"ffn_{part}": f"mlp.{SHARED_EXPERT}.{part}_proj" for part in ("gate", "up", "down")}),
        ),
        fields={**GGUF_FIELDS, **CONSTANTS},
        optional_fields={
            **EXPERT_FIELDS,
            EXPERT_COUNT: "num_local_experts",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "rope.scaling.finetuned": "gguf_rotated",
        },
        constants={"num_local_experts": 0},
        complete=_of_gguf,
        marks=("attention.scale",),
    ),
    weights=WEIGHTS,
    runs_through_transformers=False,
)
