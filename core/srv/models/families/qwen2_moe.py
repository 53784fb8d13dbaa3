"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a shared expert whose result a sigmoid scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import MoE, Part, alike
from srv.models.checkpoints.gguf_layout import EXPERT_FIELDS, GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import (
    Sizes,
    decoder_sizes,
    windows_of_types,
)
from srv.models.families.qwen2 import QWEN_DEFAULTS
from srv.models.layers.moe_config import COUNT_FIELDS, Routing

MOE_DEFAULTS: dict[str, Any] = {
    **QWEN_DEFAULTS,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "mlp_only_layers": (),
}


def tree(config: Mapping[str, Any]) -> Part:
    sizes, window = decoder_sizes(config, reads=COUNT_FIELDS), config["sliding_window"]
    types = _layer_types(config, sizes.layers) if window and config["use_sliding_window"] else None
    sparse = experts(config, sizes, shared=int(config["shared_expert_intermediate_size"]))
    bias, dense = bool(config["qkv_bias"]), parts.mlp(sizes)
    windows = (None,) * sizes.layers if types is None else windows_of_types(types, sizes.layers, int(window))
    attention = alike(windows, lambda window: parts.attention(sizes, bias=bias, output_bias=False, window=window))
    feeding = [sparse if each else dense for each in sparse_layers(config, sizes.layers)]
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, feeding))


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    first = int(config["max_window_layers"])
    sliding = (index % 2 == 0 and index < first for index in range(layers))
    return config.get("layer_types") or ["sliding_attention" if each else "full_attention" for each in sliding]


def experts(config: Mapping[str, Any], sizes: Sizes, shared: int = 0) -> MoE:
    """The experts of the Qwen models, with a gated MLP of size `shared` beside them."""
    count = config.get("num_local_experts") or config["num_experts"]  # transformers 5 writes the first for Qwen3
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=bool(config["norm_topk_prob"]))
    inner = int(config["moe_intermediate_size"])
    return parts.mixture(sizes, int(count), inner, routing, shared=shared, shared_gate=True)


def sparse_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: every `decoder_sparse_step`-th one, except `mlp_only_layers`."""
    step, dense = int(config["decoder_sparse_step"]), set(config["mlp_only_layers"] or ())
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(layers))


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Older files leave out the sizes of experts: they have the size of the MLP, divided among those of a token."""
    inner = config["intermediate_size"]
    each = config.get("moe_intermediate_size") or inner // config["num_experts_per_tok"]
    shared = config.get("shared_expert_intermediate_size") or inner
    return {**config, "moe_intermediate_size": each, "shared_expert_intermediate_size": shared}


ARCHITECTURE = Architecture(
    name="Qwen2MoeForCausalLM",
    tree=tree,
    defaults={
        **MOE_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
    model_type="qwen2_moe",
    gguf=GGUFLayout(
        "qwen2moe",
        fields=EXPERT_FIELDS,
        optional_fields={
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        complete=_of_gguf,
    ),
)
