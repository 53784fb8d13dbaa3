"""Jamba: Mamba in most layers, attention without positions in the others, and experts in some. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import MLP, MoE, Norm, Part
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes
from srv.models.families.builders.mamba import selective_scan, step_rank
from srv.models.layers.moe_config import Routing
from srv.models.layers.recurrent_sizes import SelectiveScanSizes
from srv.models.unsupported import UnsupportedConfig


def tree(config: Mapping[str, Any]) -> Part:
    """With a single expert, all layers have an MLP."""
    sizes = decoder_sizes({**config, "rope_parameters": None, "rope_scaling": None}, reads=("num_experts",))
    count, used = int(config["num_experts"]), int(config["num_experts_per_tok"])
    attends = _numbered(config, "attn_layer", sizes.layers)
    if not any(attends):
        raise UnsupportedConfig(f"attn_layer_offset gives none of {sizes.layers} layers attention")
    is_sparse = [count > 1 and each for each in _numbered(config, "expert_layer", sizes.layers)]
    attention, dense = parts.attention(sizes, rotated=False), parts.mlp(sizes)
    sparse: MLP | MoE = dense
    if any(is_sparse):
        sparse = parts.mixture(sizes, count, sizes.intermediate_size, Routing(used), router="router")
    state, rank = int(config["mamba_d_state"]), step_rank(config["mamba_dt_rank"], sizes.hidden_size)
    inner, biases = int(config["mamba_expand"]) * sizes.hidden_size, bool(config["mamba_proj_bias"])
    scanned = SelectiveScanSizes(inner, state, int(config["mamba_d_conv"]), rank, bool(config["mamba_conv_bias"]))
    of_parameters = {"dt_layernorm": rank, "b_layernorm": state, "c_layernorm": state}
    norms = tuple(Norm(size, sizes.norm_eps, name=name) for name, size in of_parameters.items())
    mamba = selective_scan(scanned, sizes.hidden_size, biases, norms)
    mixers = [attention if each else mamba for each in attends]
    layers = parts.pre_norm_layers(sizes, mixers, [sparse if each else dense for each in is_sparse])
    return parts.decoder(sizes, layers)


def _numbered(config: Mapping[str, Any], field: str, layers: int) -> list[bool]:
    """Whether each layer is one of those that a period and an offset name."""
    period, offset = int(config[f"{field}_period"]), int(config[f"{field}_offset"])
    if not 0 <= offset < period:
        raise UnsupportedConfig(f"{field}_offset = {offset} is not below {field}_period = {period}")
    return [index % period == offset for index in range(layers)]


ARCHITECTURE = Architecture(
    name="JambaForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 65536,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": "auto",
        "mamba_expand": 2,
        "mamba_proj_bias": False,
    },
    weights=(Rename(parts={"feed_forward": "mlp", "pre_ff_layernorm": parts.BEFORE_MLP, "final_layernorm": "norm"}),),
    names={"num_local_experts": "num_experts"},
    runs_through_transformers=False,
)
