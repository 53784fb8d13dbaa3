"""What the fields of a configuration tell of each layer of a model without native layers: its window and its heads.

Torch-free. These are claims that the class in transformers is compared with when it is loaded
(`srv.models.transformers`); must know architectures by name only as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.models.derive import grouped
from srv.specs import CacheSpec, FullAttention, SlidingWindow

ATTENTIONS_PER_LAYER = {"diffllama": 2, "longcat_flash": 2}  # of each layer that the configuration counts
REPEATED_KEYS = ("jetmoe",)  # model types whose class repeats its keys for every query head before attention


class Heads(NamedTuple):
    """The KV heads of a layer, and the elements of one."""

    kv_heads: int
    head_dim: int


def layer_windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    """The sliding window of each layer; one that no field tells counts as full attention, which masks outside it."""
    types, window = text.get("layer_types"), text.get("sliding_window")
    if not isinstance(types, list) or len(types) != layers or not isinstance(window, int) or window < 1:
        return [None] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def attentions_per_layer(text: Mapping[str, Any]) -> int:
    """How often a layer of those that a configuration counts attends in a pass; each needs keys and values of its own.

    HRM-Text computes its two stacks in cycles. Once transformers has saved its configuration, that counts attentions.
    """
    kind = str(text.get("model_type"))
    if kind == "hrm_text" and text.get("num_layers_per_stack") is None:
        return int(text.get("H_cycles", 2)) * (int(text.get("L_cycles", 3)) + 1)
    return ATTENTIONS_PER_LAYER.get(kind, 1)


def latent_head(text: Mapping[str, Any]) -> int:
    """The elements of a key of one head in latent attention, whose class computes keys of every head; 0 elsewhere."""
    rank, plain, rotary = (
        int(text.get(name) or 0) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    return max(plain + rotary, int(text.get("v_head_dim") or 0)) if rank and plain and rotary else 0


def common_heads(text: Mapping[str, Any], hidden_size: int, heads: int) -> Heads:
    """The heads of a layer for which no field says otherwise."""
    if size := latent_head(text):
        return Heads(heads, size)
    size = int(text.get("head_dim") or hidden_size // heads)
    if text.get("model_type") in REPEATED_KEYS:
        return Heads(heads, size)
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return Heads(1, size)
    nested = text.get("attn_config")  # of DBRX
    own = nested.get("kv_n_heads") if isinstance(nested, Mapping) else None
    return Heads(int(text.get("num_kv_heads") or text.get("num_key_value_heads") or own or heads), size)


def cache_groups(text: Mapping[str, Any], layers: int, common: Heads, context_length: int) -> tuple[CacheSpec, ...]:
    """The cache groups of a model by the fields of its layers; the last ones may read the keys and values of others."""
    found: list[CacheSpec] = []
    windows = layer_windows(text, layers)[: layers - int(text.get("num_kv_shared_layers") or 0)]
    for index, window in enumerate(windows):
        kv_heads, size = _heads_of(text, index, common)
        sizes = (kv_heads, size, size)
        found.append(FullAttention((index,), *sizes) if window is None else SlidingWindow((index,), *sizes, window))
    return grouped(found, context_length)


def _heads_of(text: Mapping[str, Any], index: int, common: Heads) -> Heads:
    """Facts: `per_layer_config` of transformers holds fields of single layers; Gemma 4's files have names instead."""
    each = text.get("per_layer_config")
    own = each.get(str(index), {}) if isinstance(each, Mapping) else {}
    types = text.get("layer_types")
    if not own and isinstance(types, list) and types[index : index + 1] == ["full_attention"]:
        shared = text.get("attention_k_eq_v")
        own = {
            "head_dim": text.get("global_head_dim"),
            "num_key_value_heads": text.get("num_global_key_value_heads") if shared else None,
        }
    return Heads(int(own.get("num_key_value_heads") or common.kv_heads), int(own.get("head_dim") or common.head_dim))
