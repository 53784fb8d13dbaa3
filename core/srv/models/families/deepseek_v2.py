"""DeepSeek-V2: latent attention, and experts chosen by their share of a softmax, of all groups or the best ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders.deepseek import DEFAULTS, WEIGHTS, deepseek_tree, gguf_layout, groups_of
from srv.models.layers.moe_config import Routing
from srv.models.unsupported import UnsupportedConfig


def tree(config: Mapping[str, Any]) -> Part:
    return deepseek_tree(config, _routing)


def _routing(config: Mapping[str, Any]) -> Routing:
    """Transformers does not divide the weights by their sum, whatever `norm_topk_prob` says."""
    method, scale = config["topk_method"], float(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        raise UnsupportedConfig("norm_topk_prob = True is not implemented natively")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedConfig(f"topk_method = {method!r} is not implemented natively")
    groups, used = groups_of(config) if method == "group_limited_greedy" else (1, 1)
    return Routing(int(config["num_experts_per_tok"]), "softmax", groups=groups, top_groups=used, scale=scale)


ARCHITECTURE = Architecture(
    name="DeepseekV2ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    gguf=gguf_layout(first_k_dense_replace=0),
    model_type="deepseek_v2",
    weights=WEIGHTS,
    runs_through_transformers=False,
)
