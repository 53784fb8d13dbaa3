"""Llama 4 (text): experts that read scaled inputs, and rotation and attention within chunks in three of four layers.

The other layers have no rotary embedding, and their queries grow with the position (Nakanishi 2025, arXiv:2501.19399).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, MoE, Part, Temperature, alike
from srv.models.checkpoints.gguf_layout import EXPERT_COUNT, EXPERT_FIELDS, GGUFLayout, layer_names
from srv.models.checkpoints.rules import PermuteRotary, Rename, StackedExperts
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes
from srv.models.families.glm import rotated_dims
from srv.models.layers.moe_config import Routing
from srv.models.unsupported import UnsupportedConfig

KINDS = ("full_attention", "chunked_attention")
EXPERTS_OF_MAVERICK = 128


def tree(config: Mapping[str, Any]) -> Part:
    of_mlp = {**config, "intermediate_size": config["intermediate_size_mlp"]}  # of layers without experts
    sizes = decoder_sizes(of_mlp, reads=("num_local_experts", "no_rope_layers"))
    rotated, bias, unit = _rotated(config, sizes.layers), bool(config["attention_bias"]), bool(config["use_qk_norm"])
    tuned = Temperature(float(config["floor_scale"]), float(config["attn_scale"]))
    temperature = tuned if config["attn_temperature_tuning"] else None

    def attention(kind: tuple[bool, int | None]) -> Attention:
        is_rotated, chunk = kind
        if is_rotated:
            return parts.attention(sizes, bias=bias, unit_norm=unit, chunk=chunk)
        return parts.attention(sizes, bias=bias, rotated=False, chunk=chunk, temperature=temperature)

    attentions = alike(zip(rotated, _chunks(config, rotated), strict=True), attention)
    sparse, dense = _experts(config, sizes), parts.mlp(sizes)
    feeding = [sparse if each else dense for each in _sparse_layers(config, sizes.layers)]
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attentions, feeding))


def _experts(config: Mapping[str, Any], sizes: Sizes) -> MoE:
    """The shared expert is as large as the others."""
    inner, count = int(config["intermediate_size"]), int(config["num_local_experts"])
    routing = Routing(int(config["num_experts_per_tok"]), scoring="sigmoid")
    return parts.mixture(sizes, count, inner, routing, shared=inner, router="router", scales_inputs=True)


def _rotated(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have a rotary embedding: despite its name, those with a 1 in `no_rope_layers`."""
    listed = config.get("no_rope_layers")
    if not listed:
        interval = int(config["no_rope_layer_interval"])
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if len(listed) != layers:
        raise UnsupportedConfig(f"no_rope_layers has {len(listed)} entries for {layers} layers")
    return tuple(bool(each) for each in listed)


def _chunks(config: Mapping[str, Any], rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    types = config.get("layer_types") or [KINDS[each] for each in rotated]
    unknown = sorted(set(types) - set(KINDS))
    if unknown or len(types) != len(rotated):
        raise UnsupportedConfig(f"layer_types = {types!r} of {len(rotated)} layers is not implemented natively")
    size = config["attention_chunk_size"]
    if "chunked_attention" in types and (not isinstance(size, int) or size < 1):
        raise UnsupportedConfig(f"attention_chunk_size = {size!r} is not a number of tokens")
    return tuple(size if kind == "chunked_attention" else None for kind in types)


def _sparse_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    listed, step = config.get("moe_layers"), int(config["interleave_moe_layer_step"])
    sparse = set(range(step - 1, layers, step) if listed is None else listed)
    return tuple(index in sparse for index in range(layers))


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Files say neither which layers rotate nor how queries grow. Of two published sizes, one has norms of heads."""
    return {**config, "use_qk_norm": config["num_local_experts"] != EXPERTS_OF_MAVERICK}


ARCHITECTURE = Architecture(
    name="Llama4ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "eos_token_id": 2,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    gguf=GGUFLayout(
        "llama4",
        weights=(layer_names({"ffn_gate_inp": "mlp.router"}), PermuteRotary(rotated_dims)),
        fields={
            **EXPERT_FIELDS,
            EXPERT_COUNT: "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            "feed_forward_length": "intermediate_size_mlp",
        },
        complete=_of_gguf,
    ),
    model_type="llama4_text",
    weights=(Rename(parts={"feed_forward": "mlp"}), PermuteRotary(rotated_dims), StackedExperts("halves")),
    runs_through_transformers=False,
)
