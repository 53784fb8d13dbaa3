"""Qwen3.5: the text part. Layers are those of Qwen3-Next, but each projection of the delta rule has its own matrix.

Images give rotary embeddings three positions per token; of text, all three are equal, so that their `mrope_section`
changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.row_orders import RowOrder
from srv.models.families.architecture import Architecture
from srv.models.families.qwen3_next import (
    GGUF_EXPERTS,
    GGUF_FIELDS,
    GGUF_LAYERS,
    GGUF_NAMES,
    PLAIN_NORM,
    SHARED_DEFAULTS,
    TILED,
    gated_tree,
    of_gguf,
)
from srv.models.layers.moe_config import Routing


def dense_tree(config: Mapping[str, Any]) -> Part:
    return gated_tree(config, None, (False,) * int(config["num_hidden_layers"]), by_heads=False)


def sparse_tree(config: Mapping[str, Any]) -> Part:
    """No layer has an MLP, so that configurations do not state its size."""
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=True)
    sparse = (True,) * int(config["num_hidden_layers"])
    return gated_tree({"intermediate_size": 0, **config}, routing, sparse, by_heads=False)


def _gguf_orders(config: Mapping[str, Any]) -> dict[str, RowOrder]:
    """Files have the value heads of each key head in turns, the first of all of them first."""
    heads, size = int(config["linear_num_key_heads"]), int(config["linear_value_head_dim"])
    each = int(config["linear_num_value_heads"]) // heads
    order = [index * heads + head for head in range(heads) for index in range(each)]
    values = tuple(head * size + row for head in order for row in range(size))
    keys = 2 * heads * int(config["linear_key_head_dim"])
    channels = RowOrder((*range(keys), *(keys + row for row in values)))
    rates = dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), RowOrder(tuple(order)))
    found = {"in_proj_qkv": channels, "conv1d": channels, "in_proj_z": RowOrder(values), **rates}
    return {f"linear_attn.{name}": rows for name, rows in found.items()}


def _gguf_layout(name: str, fields: Mapping[str, str]) -> GGUFLayout:
    return GGUFLayout(
        name,
        weights=GGUF_NAMES,
        fields={**GGUF_FIELDS, **fields},
        optional_fields=GGUF_LAYERS,
        constants={TILED: True},
        complete=of_gguf,
        norms_plus_one=True,
        plain_norms=(PLAIN_NORM,),
        orders=_gguf_orders,
    )


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
    gguf=_gguf_layout("qwen35", {}),
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
    gguf=_gguf_layout("qwen35moe", GGUF_EXPERTS),
    model_type="qwen3_5_moe_text",
    runs_through_transformers=False,
)
