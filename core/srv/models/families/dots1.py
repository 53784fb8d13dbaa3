"""dots.llm1: norms of heads, and experts with a sigmoid router and shared experts from some layer on. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part, alike
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, one_window, windows_of_types
from srv.models.families.builders.deepseek import feed_forward, sparse_from
from srv.models.families.deepseek_v3 import routing
from srv.models.layers.moe_config import COUNT_FIELDS
from srv.models.unsupported import refuse_unless


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"topk_method": ("noaux_tc",), "scoring_func": ("noaux_tc", "sigmoid")})
    sizes, bias = decoder_sizes(config, reads=COUNT_FIELDS), bool(config["attention_bias"])
    norms, feeding = parts.head_norms(sizes), feed_forward(config, sizes, routing, sparse_from(config, sizes.layers))
    windows = _windows(config, sizes.layers)
    attention = alike(windows, lambda window: parts.attention(sizes, bias=bias, norms=norms, window=window))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, feeding))


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """By `layer_types`, or in the layers from `max_window_layers` on."""
    window, types = one_window(config), config["layer_types"]
    if window is None:
        return (None,) * layers
    if types is None:
        first = int(config["max_window_layers"])
        types = ["full_attention" if index < first else "sliding_attention" for index in range(layers)]
    return windows_of_types(types, layers, window)


ARCHITECTURE = Architecture(
    name="Dots1ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1408,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "num_experts_per_tok": None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
    },
    model_type="dots1",
    names={"num_local_experts": "n_routed_experts"},
)
