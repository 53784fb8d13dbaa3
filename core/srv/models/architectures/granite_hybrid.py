"""Granite 4: Mamba-2 in most layers, attention in the others; experts and a shared MLP, or that MLP alone.

The constants are those of Granite 3. Models without Mamba-2 layers have this class as well. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import decoder_config
from srv.models.architectures.granite import CONSTANTS
from srv.models.architectures.hybrid_config import ATTENTION, attending, check_experts
from srv.models.architectures.mamba_config import MAMBA_DEFAULTS, MambaConfig, mamba_sizes
from srv.models.checkpoints.rules import GATE_UP, Rename, Split
from srv.models.layers.moe_config import MoEConfig, Routing
from srv.models.layers.rope_config import UnsupportedConfig

RECURRENT = "linear_attention"
KINDS = (ATTENTION, RECURRENT)
_FORMER_KINDS = {"attention": ATTENTION, "mamba": RECURRENT}
_SHARED = "shared_expert"


def make_config(config: Mapping[str, Any]) -> MambaConfig:
    """transformers rotates only if `position_embedding_type` is "rope"; published models also say "nope"."""
    base = decoder_config(config, reads=("num_local_experts", *CONSTANTS.values()))
    types = config["layer_types"] or config.get("layers_block_type") or (RECURRENT,) * base.layers
    attends = attending([_FORMER_KINDS.get(each, each) for each in types], KINDS, base.layers)
    bias, shared, experts = bool(config["attention_bias"]), int(config["shared_intermediate_size"]), _experts(config)
    if shared <= 0:
        raise UnsupportedConfig(f"shared_intermediate_size = {shared} is not a size")
    decoder = base.replace(
        intermediate_size=shared,
        qkv_bias=bias,
        output_bias=bias,
        rotated=(config["position_embedding_type"] == "rope",) * base.layers,
        embedding_multiplier=float(config["embedding_multiplier"]),
        attention_scale=float(config["attention_multiplier"]),
        residual_multiplier=float(config["residual_multiplier"]),
        logits_divisor=float(config["logits_scaling"]),
    )
    inner = int(config["mamba_expand"] * base.hidden_size)
    moe = experts._replace(intermediate=base.intermediate_size, shared_intermediate=shared) if experts else None
    return MambaConfig(decoder, attends, mamba_sizes(config, inner), moe, mlp=f"mlp.{_SHARED}")


def _experts(config: Mapping[str, Any]) -> MoEConfig | None:
    """Without the sizes of their matrices; None if the model has none."""
    count = int(config["num_local_experts"] or 0)
    if count == 0:
        return None
    moe = MoEConfig(count, 0, Routing(int(config["num_experts_per_tok"]), renormalize=True), shared=_SHARED)
    check_experts(moe)
    return moe


_NAMES = {
    f"model.layers.*.{stored}": f"model.layers.*.{own}"
    for stored, own in (
        ("mlp.router.layer", "mlp.gate"),
        ("mlp.router", "mlp.gate"),
        ("mlp.input_linear.weight", "mlp.experts.gate_up_proj"),
        ("mlp.output_linear.weight", "mlp.experts.down_proj"),
        ("shared_mlp.input_linear", f"mlp.{_SHARED}.gate_up_proj"),
        ("shared_mlp.output_linear", f"mlp.{_SHARED}.down_proj"),
    )
}
ARCHITECTURE = Architecture(
    name="GraniteMoeHybridForCausalLM",
    make_config=make_config,
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
    weights=(Rename(_NAMES, parts={"block_sparse_moe": "mlp"}), Split(f"mlp.{_SHARED}.gate_up_proj", GATE_UP)),
)
