"""Qwen3.5: the text part. Layers are those of Qwen3-Next, but each projection of the delta rule has its own matrix.

Images give rotary embeddings three positions per token; of text, all three are equal, so that their `mrope_section`
changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.qwen3_next import SHARED_DEFAULTS, gated_tree
from srv.models.layers.moe_config import Routing


def dense_tree(config: Mapping[str, Any]) -> Part:
    return gated_tree(config, None, (False,) * int(config["num_hidden_layers"]), by_heads=False)


def sparse_tree(config: Mapping[str, Any]) -> Part:
    """No layer has an MLP, so that configurations do not state its size."""
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=True)
    sparse = (True,) * int(config["num_hidden_layers"])
    return gated_tree({"intermediate_size": 0, **config}, routing, sparse, by_heads=False)


DENSE = Architecture(
    name="Qwen3_5ForCausalLM",
    tree=dense_tree,
    defaults={
        **SHARED_DEFAULTS,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    model_type="qwen3_5_text",
    runs_through_transformers=False,
)
SPARSE = Architecture(
    name="Qwen3_5MoeForCausalLM",
    tree=sparse_tree,
    defaults={
        **SHARED_DEFAULTS,
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    model_type="qwen3_5_moe_text",
    runs_through_transformers=False,
)
