"""DeepSeek-V3 (also R1 and Kimi K2): latent attention, and experts chosen by sigmoids and a learned bias.

Layers of multi-token prediction, which follow the others in checkpoints, are not loaded. Sparse attention (V3.2) is
`deepseek_v32`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders.deepseek import DEFAULTS, WEIGHTS, deepseek_tree, gguf_layout, groups_of
from srv.models.layers.moe_config import Routing
from srv.models.unsupported import refuse_unless


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)})
    return deepseek_tree(config, routing)


def routing(config: Mapping[str, Any]) -> Routing:
    groups, used = groups_of(config)
    return Routing(
        int(config["num_experts_per_tok"]),
        "sigmoid",
        renormalize=bool(config["norm_topk_prob"]),
        groups=groups,
        top_groups=used,
        scale=float(config["routed_scaling_factor"]),
        bias=True,
    )


ARCHITECTURE = Architecture(
    name="DeepseekV3ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    gguf=gguf_layout("noaux_tc", marks=("exp_probs_b",), first_k_dense_replace=0),
    model_type="deepseek_v3",
    weights=WEIGHTS,
    runs_through_transformers=False,
)
