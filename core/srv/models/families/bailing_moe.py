"""Ling and Ring (BailingMoE): fused projections of attention, experts and shared ones from some layer on. Torch-free.

The second version has norms of heads, rotates half of each, and chooses experts as DeepSeek-V3 does. Layers of
multi-token prediction are not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from srv.models.blueprint import MLP, MoE, Part
from srv.models.checkpoints.rules import QKV, Rename, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes
from srv.models.families.builders.deepseek import feed_forward, sparse_from
from srv.models.families.builders.layer_types import check_experts
from srv.models.families.deepseek_v3 import routing
from srv.models.layers.moe_config import COUNT_FIELDS, Routing
from srv.models.unsupported import refuse_unless

# No released model has other values.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_bias": (False,),
    "norm_head": (False,),
    "norm_softmax": (False,),
    "use_rmsnorm": (True,),
}
SUPPORTED_V2: dict[str, tuple[Any, ...]] = {
    **SUPPORTED,
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "norm_topk_prob": (True,),
    "multi_gate": (False,),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    sizes = decoder_sizes(config, reads=COUNT_FIELDS)
    attention = parts.attention(sizes, bias=bool(config["use_qkv_bias"]), output_bias=False)

    def of_softmax(config: Mapping[str, Any]) -> Routing:
        used = int(config["num_experts_per_tok"])
        check_experts(used, int(config["num_experts"]))
        return Routing(used, renormalize=used > 1 and bool(config["norm_topk_prob"]))

    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, _feeding(config, sizes, of_softmax)))


def tree_v2(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED_V2)
    sizes = decoder_sizes(config, reads=("partial_rotary_factor", *COUNT_FIELDS))
    norms = parts.head_norms(sizes) if config["use_qk_norm"] else None
    attention = parts.attention(sizes, bias=bool(config["use_qkv_bias"]), output_bias=False, norms=norms)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, _feeding(config, sizes, routing)))


def _feeding(config: Mapping[str, Any], sizes: Sizes, of: Callable[[Mapping[str, Any]], Routing]) -> list[MLP | MoE]:
    """`of(config)`: how experts are chosen."""
    inner, shared = int(config["moe_intermediate_size"]), int(config["num_shared_experts"] or 0)
    refuse_unless(config, {"moe_shared_expert_intermediate_size": (inner, inner * shared)})
    read = {**config, "n_routed_experts": config["num_experts"], "n_shared_experts": shared}
    return feed_forward(read, sizes, of, sparse_from(config, sizes.layers))


_NAMES = {
    "model.word_embeddings": "model.embed_tokens",
    "model.layers.*.mlp.gate.expert_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
}
_COMPONENTS = {
    "attention": "self_attn",
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
    "dense": "o_proj",
}
WEIGHTS = (Rename(_NAMES, parts=_COMPONENTS), Split("self_attn.query_key_value", QKV))
_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "use_qkv_bias": False,
    "num_experts": None,
    "num_experts_per_tok": None,
    "num_shared_experts": None,
    "moe_intermediate_size": None,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
}
ARCHITECTURE = Architecture(
    name="BailingMoeForCausalLM",
    tree=tree,
    defaults=_DEFAULTS,
    model_type="bailing_moe",
    weights=WEIGHTS,
    runs_through_transformers=False,
)
V2 = Architecture(
    name="BailingMoeV2ForCausalLM",
    tree=tree_v2,
    defaults={
        **_DEFAULTS,
        "use_qk_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    model_type="bailing_moe_v2",
    weights=WEIGHTS,
    runs_through_transformers=False,
)
