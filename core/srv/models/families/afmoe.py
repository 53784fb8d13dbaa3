"""Trinity (AFMoE): gated attention with norms of heads, norms before and after each part, and experts in most layers.

Only layers with a window rotate. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import MLP, Attention, Layer, MoE, Norm, Part, alike
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes, windows_of_pattern
from srv.models.families.builders.layer_types import check_experts
from srv.models.layers.moe_config import COUNT_FIELDS, Routing
from srv.models.unsupported import refuse_unless

# Fields of published configurations that the class of transformers does not read; no released model has other values.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "score_func": ("sigmoid",),
    "route_norm": (True,),
    "n_group": (1,),
    "topk_group": (1,),
    "num_expert_groups": (1,),
    "num_limited_groups": (1,),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    sizes = decoder_sizes(config, reads=COUNT_FIELDS)
    first, norms, bias = int(config["num_dense_layers"]), parts.head_norms(sizes), bool(config["attention_bias"])
    sparse, dense = _experts(config, sizes), parts.mlp(sizes)
    feeding = [sparse if index >= first else dense for index in range(sizes.layers)]

    def attention(window: int | None) -> Attention:
        return parts.attention(sizes, bias=bias, norms=norms, rotated=window is not None, window=window, gated=True)

    def norm(name: str, adds: bool = False) -> Norm:
        return Norm(sizes.hidden_size, sizes.norm_eps, adds=adds, name=name)

    before, after = (norm(parts.BEFORE_MIXER, adds=True),), (norm("post_mlp_layernorm"),)
    between = norm(parts.BEFORE_MLP), norm("pre_mlp_layernorm", adds=True)

    def layer(kind: tuple[Attention, MLP | MoE]) -> Layer:
        mixer, feed_forward = kind
        return Layer(before, (mixer,), between, feed_forward, after)

    layers = alike(zip(alike(_windows(config, sizes.layers), attention), feeding, strict=True), layer)
    return parts.decoder(sizes, layers, factor=math.sqrt(sizes.hidden_size) if config["mup_enabled"] else 1.0)


def _experts(config: Mapping[str, Any], sizes: Sizes) -> MoE:
    count, used, inner = (int(config[name]) for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
    check_experts(used, count)
    routing = Routing(used, "sigmoid", renormalize=True, scale=float(config["route_scale"]), bias=True)
    shared = inner * int(config["num_shared_experts"])
    return parts.mixture(
        sizes, count, inner, routing, shared=shared, shared_name="shared_experts", router="router.gate"
    )


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    return windows_of_pattern({**config, "sliding_window_pattern": config["global_attn_every_n_layers"]}, layers)


ARCHITECTURE = Architecture(
    name="AfmoeForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 200192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "num_dense_layers": 1,
        "moe_intermediate_size": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
        "global_attn_every_n_layers": 4,
        "sliding_window": 1024,
        "mup_enabled": False,
    },
    model_type="afmoe",
    weights=(Rename({"model.layers.*.mlp.expert_bias": "model.layers.*.mlp.router.gate.e_score_correction_bias"}),),
)
