"""DeepSeek-V2 and V3: the facts of decoders with latent attention and, from some layer on, a mixture of experts.

Torch-free. Owns what both have in common; the file of each one says how it chooses experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from srv.models.blueprint import MLP, MoE, Part
from srv.models.checkpoints.gguf_layout import (
    EXPERT_COUNT,
    EXPERT_FIELDS,
    ROUTING_FIELDS,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    GGUFLayout,
    layer_names,
)
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes
from srv.models.families.builders.latent import LatentSizes, latent_attention, latent_sizes
from srv.models.families.builders.layer_types import check_groups
from srv.models.layers.moe_config import COUNT_FIELDS, ExpertActivation, Routing
from srv.models.layers.rope_config import RopeConfig, rope_config
from srv.models.unsupported import UnsupportedConfig, refuse_unless

INNER_NORM_EPS = 1e-6  # of the norms of compressed vectors, whatever rms_norm_eps is


def rotary_dims(config: Mapping[str, Any]) -> int:
    """The dimensions per head whose rotary pairs are adjacent in checkpoints."""
    return int(config["qk_rope_head_dim"])


WEIGHTS = (PermuteRotary(rotary_dims),)
_LATENT_NAMES = layer_names(
    {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",  # or both of its parts
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    }
)


def gguf_layout(method: str | None = None, marks: tuple[str, ...] = (), **constants: Any) -> GGUFLayout:
    """Of files for the architecture "deepseek2" of llama.cpp, by which it means V2 and V3.

    `method`: the field `topk_method` of all files; None: whether they have groups of experts decides.
    """
    return GGUFLayout(
        "deepseek2",
        weights=(_LATENT_NAMES, SHARED_EXPERTS, *WEIGHTS),
        fields={
            "attention.key_length": "gguf_key_length",
            "attention.value_length": "v_head_dim",
            "attention.kv_lora_rank": "kv_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        optional_fields={
            **EXPERT_FIELDS,
            **ROUTING_FIELDS,
            EXPERT_COUNT: "n_routed_experts",
            "attention.q_lora_rank": "q_lora_rank",
            "attention.key_length_mla": "gguf_key_length",
            "attention.value_length_mla": "v_head_dim",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        constants={"q_lora_rank": None, "topk_method": method, **constants},
        implied={} if method is None else SIGMOID_ROUTER,
        complete=_of_gguf,
        marks=marks,
    )


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Files have the size of whole keys."""
    rotated, grouped = config["qk_rope_head_dim"], (config.get("n_group") or 1) > 1
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    return {
        **{name: value for name, value in config.items() if name != "gguf_key_length"},
        "qk_nope_head_dim": config["gguf_key_length"] - rotated,
        "head_dim": rotated,
        "num_key_value_heads": config["num_attention_heads"],
        "rope_parameters": rope,
        "topk_method": config["topk_method"] or ("group_limited_greedy" if grouped else "greedy"),
    }


DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)
# Only these values of fields that change the computation are implemented; None is as if the field were left out.
SUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"mlp_layer_types": (), "moe_layer_freq": (1,), "mlp_bias": (False,), "rope_interleave": (True,)}
)


def deepseek_tree(config: Mapping[str, Any], routing: Callable[[Mapping[str, Any]], Routing]) -> Part:
    """A model with experts from `first_k_dense_replace` on. `routing(config)`: how they are chosen."""
    sizes, latent, rope = deepseek_sizes(config)
    feeding = feed_forward(config, sizes, routing, sparse_from(config, sizes.layers))
    attention = latent_attention(latent, rope, bias=bool(config["attention_bias"]))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, feeding))


def deepseek_sizes(config: Mapping[str, Any]) -> tuple[Sizes, LatentSizes, RopeConfig]:
    """Those of everything besides attention, whose heads are those of the rotary part, and those of attention.

    Raises UnsupportedConfig with the field that is not implemented.
    """
    refuse_unless(config, SUPPORTED)
    rope_dim, heads = int(config["qk_rope_head_dim"]), int(config["num_attention_heads"])
    fields = {**config, "head_dim": rope_dim, "num_key_value_heads": heads}
    sizes = decoder_sizes(fields, COUNT_FIELDS)
    rope = rope_config(fields, sizes.head_dim)
    return sizes, latent_sizes(config, rope, INNER_NORM_EPS), rope


def feed_forward(
    config: Mapping[str, Any],
    sizes: Sizes,
    routing: Callable[[Mapping[str, Any]], Routing],
    is_sparse: Sequence[bool],
    activation: ExpertActivation = "silu",
) -> list[MLP | MoE]:
    """The feed-forward part of each layer. `routing(config)` is called if a layer has experts."""
    dense = parts.mlp(sizes)
    if not any(is_sparse):
        return [dense for _ in is_sparse]
    sparse = _experts(config, sizes, routing(config), activation)
    return [sparse if each else dense for each in is_sparse]


def sparse_from(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: from `first_k_dense_replace` on."""
    dense = int(config.get("first_k_dense_replace") or 0)
    return tuple(index >= dense for index in range(layers))


def sparse_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: by `mlp_layer_types`, or from `first_k_dense_replace` on."""
    types = config.get("mlp_layer_types")
    if types is None:
        return sparse_from(config, layers)
    if len(types) != layers or set(types) - {"dense", "sparse"}:
        raise UnsupportedConfig(f"mlp_layer_types = {types!r} is not implemented natively for {layers} layers")
    return tuple(kind == "sparse" for kind in types)


def _experts(config: Mapping[str, Any], sizes: Sizes, routing: Routing, activation: ExpertActivation) -> MoE:
    count, size = int(config["n_routed_experts"]), int(config["moe_intermediate_size"])
    check_groups(routing, count)
    shared = int(config.get("n_shared_experts") or 0) * size
    return parts.mixture(
        sizes, count, size, routing, shared=shared, shared_name="shared_experts", activation=activation
    )


def groups_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """The number of groups of experts, and of those that a token uses."""
    return int(config["n_group"] or 1), int(config["topk_group"] or 1)
