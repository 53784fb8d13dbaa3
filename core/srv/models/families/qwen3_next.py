"""Qwen3-Next: the facts of a decoder most of whose layers keep a recurrent state instead of keys and values.

Every fourth layer has attention, with a sigmoid gate on its result; the others have the gated delta rule. The
feed-forward layers are mixtures of experts, or dense ones. Torch-free. Owns what Qwen3.5
(`qwen3_5`) has in common with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.models.blueprint import MLP, Linear, MoE, Norm, Part, Tensors
from srv.models.blueprint.recurrent import DeltaNet
from srv.models.checkpoints.gguf_layout import (
    EXPERT_FIELDS,
    HEAD_NORM_NAMES,
    GGUFLayout,
    layer_names,
    state_space_names,
)
from srv.models.checkpoints.row_orders import RowOrder
from srv.models.checkpoints.rules import Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes
from srv.models.families.builders.layer_types import check_experts, has_attention
from srv.models.layers.delta_sizes import DeltaSizes
from srv.models.layers.moe_config import Routing
from srv.models.unsupported import UnsupportedConfig

KINDS = ("linear_attention", "full_attention")
# Fields that only GGUF files set: `by_heads` and `tiled` of `DeltaSizes`.
BY_HEADS, TILED = "gguf_by_heads", "gguf_tiled"


def delta_net(sizes: DeltaSizes, hidden: int, eps: float) -> DeltaNet:
    """A layer with the gated delta rule."""
    (inputs, rates), (of_inputs, of_rates) = sizes.inputs, sizes.input_sections
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (channels, 1, sizes.width) for name, channels in sizes.convolutions.items()
    }
    shapes |= dict.fromkeys(("dt_bias", "A_log"), (sizes.value_heads,))
    sections = {} if sizes.apart else {"conv1d.weight": sizes.channel_sections}
    return DeltaNet(
        Linear(inputs, hidden, split="out", sections=of_inputs),
        Linear(rates, hidden, split="out", sections=of_rates),
        Tensors(shapes, divided=True, sections=sections),
        Norm(sizes.value_dim, eps, name="o_norm" if sizes.apart else "norm"),
        Linear({sizes.output: hidden}, sizes.values, split="in", sections=(sizes.output_sections,)),
        sizes,
        name="linear_attn",
    )


def tree(config: Mapping[str, Any]) -> Part:
    layers = range(int(config["num_hidden_layers"]))
    dense, step = set(config["mlp_only_layers"] or ()), int(config["decoder_sparse_step"])
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=bool(config["norm_topk_prob"]))
    is_sparse = tuple(i not in dense and int(config["num_experts"]) > 0 and (i + 1) % step == 0 for i in layers)
    return gated_tree(config, routing, is_sparse, by_heads=config.get(BY_HEADS, True))


def gated_tree(
    config: Mapping[str, Any], routing: Routing | None, is_sparse: tuple[bool, ...], *, by_heads: bool
) -> Part:
    """`routing`: of experts, in the layers for which `is_sparse` is true. `by_heads`: as in `DeltaSizes`.

    Norms are computed in float32.
    """
    own = ("partial_rotary_factor",) if routing is None else ("partial_rotary_factor", "num_experts")
    sizes = decoder_sizes(config, reads=own)
    bias = bool(config["attention_bias"])
    delta = DeltaSizes(
        int(config["linear_num_key_heads"]),
        int(config["linear_num_value_heads"]),
        int(config["linear_key_head_dim"]),
        int(config["linear_value_head_dim"]),
        int(config["linear_conv_kernel_dim"]),
        by_heads,
        tiled=bool(config.get(TILED)),
    )
    if delta.value_heads % delta.key_heads:
        reason = f"{delta.value_heads} value heads are not a multiple of {delta.key_heads} key heads"
        raise UnsupportedConfig(f"{reason} (linear_num_value_heads, linear_num_key_heads)")
    types = config.get("layer_types")
    if types is None:
        interval = int(config["full_attention_interval"])
        types = [KINDS[(layer + 1) % interval == 0] for layer in range(sizes.layers)]
    attends = has_attention(types, KINDS, sizes.layers)
    dense: MLP | MoE = parts.mlp(sizes)
    sparse = _experts(config, sizes, routing) if routing is not None and any(is_sparse) else dense
    norms = parts.head_norms(sizes, wide=True)
    attention = parts.attention(sizes, bias=bias, norms=norms, gated_queries=True)
    recurrent = delta_net(delta, sizes.hidden_size, sizes.norm_eps)
    mixers = [attention if each else recurrent for each in attends]
    feeding = [sparse if each else dense for each in is_sparse]
    made = parts.pre_norm_layers(sizes, mixers, feeding, wide=True)
    return parts.decoder(sizes, made, parts.last_norm(sizes, wide=True))


def _experts(config: Mapping[str, Any], sizes: Sizes, routing: Routing) -> MoE:
    """With a gated MLP beside them."""
    count, inner = int(config["num_experts"]), int(config["moe_intermediate_size"])
    shared = int(config["shared_expert_intermediate_size"])
    check_experts(routing.top_k, count)
    if shared <= 0:
        raise UnsupportedConfig(f"shared_expert_intermediate_size = {shared} is not a size")
    return parts.mixture(sizes, count, inner, routing, shared=shared, shared_gate=True)


GGUF_NAMES = (
    HEAD_NORM_NAMES,
    layer_names(
        {
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_in": "linear_attn.in_proj_qkvz",  # of older files
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "post_attention_norm": "post_attention_layernorm",
        }
    ),
    state_space_names("linear_attn"),
)
GGUF_FIELDS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "gguf_inner",
}
GGUF_LAYERS = {
    "attention.recurrent_layers": "gguf_recurrent",
    "full_attention_interval": "full_attention_interval",
}
GGUF_EXPERTS = {
    **EXPERT_FIELDS,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
PLAIN_NORM = "linear_attn.norm.weight"


def of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Layers of multi-token prediction follow those that are listed."""
    recurrent, own = config.get("gguf_recurrent"), ("gguf_inner", "gguf_recurrent")
    made = {name: value for name, value in config.items() if name not in own}
    made["linear_value_head_dim"] = config["gguf_inner"] // config["linear_num_value_heads"]
    if recurrent is not None:
        made["layer_types"] = [KINDS[not each] for each in recurrent[: config["num_hidden_layers"]]]
    return made


def _gguf_orders(config: Mapping[str, Any]) -> dict[str, RowOrder]:
    """Files have the rates and decays of one key head after the other."""
    if config.get(BY_HEADS, True):
        return {}
    heads = int(config["linear_num_key_heads"])
    each = int(config["linear_num_value_heads"]) // heads
    rows = range(2 * each * heads)
    halves = ([row for row in rows if row // each % 2 == half] for half in range(2))
    return {"linear_attn.in_proj_ba": RowOrder(tuple(row for half in halves for row in half))}


# The values that transformers uses for fields that a configuration of either family leaves out.
SHARED_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 16,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
)
ARCHITECTURE = Architecture(
    name="Qwen3NextForCausalLM",
    tree=tree,
    defaults={
        **SHARED_DEFAULTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    gguf=GGUFLayout(
        "qwen3next",
        weights=GGUF_NAMES,
        fields={**GGUF_FIELDS, **GGUF_EXPERTS},
        optional_fields=GGUF_LAYERS,
        present={BY_HEADS: "blk.0.ssm_in.weight", "gguf_apart": "blk.0.attn_gate.weight"},
        rules_if={"gguf_apart": (Split("linear_attn.in_proj_ba", ("in_proj_b", "in_proj_a")),)},
        constants={"norm_topk_prob": True},
        complete=of_gguf,
        norms_plus_one=True,
        plain_norms=(PLAIN_NORM,),
        orders=_gguf_orders,
    ),
    model_type="qwen3_next",
    runs_through_transformers=False,
)
