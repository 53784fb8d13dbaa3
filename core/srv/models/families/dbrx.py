"""DBRX: layer norms without biases, bounds of queries, keys and values, and experts that are three matrices per layer.

Torch-free. The fields of attention and of experts are nested; the base of the rotary embedding is among the former.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import QKV, Rename, Split, StackedExperts
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.builders.layer_types import check_experts
from srv.models.layers.moe_config import Routing
from srv.models.unsupported import refuse_unless

ATTENTION: Mapping[str, Any] = MappingProxyType({"clip_qkv": None, "kv_n_heads": 1, "rope_theta": None})
EXPERTS: Mapping[str, Any] = MappingProxyType(
    {
        "ffn_act_fn": None,
        "ffn_hidden_size": 3584,
        "moe_num_experts": 4,
        "moe_top_k": 1,
        "moe_normalize_expert_weights": 1.0,
    }
)
NORM_EPS = 1e-5


def tree(config: Mapping[str, Any]) -> Part:
    attending, feeding = ({**ATTENTION, **(config["attn_config"] or {})}, {**EXPERTS, **(config["ffn_config"] or {})})
    refuse_unless(feeding, {"ffn_act_fn": ({"name": "silu"},), "moe_normalize_expert_weights": (1,)}, "ffn_config.")
    own = {
        "hidden_size": config["d_model"],
        "num_attention_heads": config["n_heads"],
        "num_hidden_layers": config["n_layers"],
        "max_position_embeddings": config["max_seq_len"],
        "num_key_value_heads": attending["kv_n_heads"],
        "intermediate_size": feeding["ffn_hidden_size"],
        "rms_norm_eps": NORM_EPS,
    }
    if attending["rope_theta"] is not None:
        own["rope_parameters"] = {**(config.get("rope_parameters") or {}), "rope_theta": attending["rope_theta"]}
    sizes, bound = decoder_sizes({**config, **own}), attending["clip_qkv"]
    attention = replace(parts.attention(sizes), clip=None if bound is None else float(bound))
    count, used = int(feeding["moe_num_experts"]), int(feeding["moe_top_k"])
    check_experts(used, count)
    routing = Routing(used, renormalize=feeding["moe_normalize_expert_weights"] is not None)
    experts = parts.mixture(sizes, count, sizes.intermediate_size, routing)
    return layer_norm.decoder(sizes, attention, experts, norm_bias=False)


_LAYER = {
    "norm_attn_norm.norm_1": "input_layernorm",
    "norm_attn_norm.norm_2": "post_attention_layernorm",
    "norm_attn_norm.attn.Wqkv": "self_attn.qkv_proj",
    "norm_attn_norm.attn.out_proj": "self_attn.o_proj",
    "ffn.router.layer": "mlp.gate",
    "ffn.experts.mlp.w1": "mlp.experts.gate_proj",
    "ffn.experts.mlp.v1": "mlp.experts.up_proj",
    "ffn.experts.mlp.w2": "mlp.experts.down_proj",
}
_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.norm_f": "model.norm",
    **{f"transformer.blocks.*.{stored}": f"model.layers.*.{name}" for stored, name in _LAYER.items()},
}
ARCHITECTURE = Architecture(
    name="DbrxForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 32000,
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "max_seq_len": 2048,
        "tie_word_embeddings": False,
        "attn_config": None,
        "ffn_config": None,
    },
    model_type="dbrx",
    weights=(Rename(_NAMES), Split("self_attn.qkv_proj", QKV), StackedExperts("rows")),
    names={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    },
)
