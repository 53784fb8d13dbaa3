"""Gemma 4 (text): larger heads in layers with full attention, inputs of single layers, and experts beside an MLP.

Torch-free. Layers with full attention may take their keys for values, and upper layers may read the cache of lower
ones. The unified models have the same layers, without inputs of their own and without experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.models.blueprint import Attention, Layer, Linear, Norm, Part, Tensors, alike
from srv.models.blueprint.gemma import LayerScale, SideExperts
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import (
    Sizes,
    decoder_sizes,
    soft_cap,
    windows_of_pattern,
)
from srv.models.families.builders.gemma import attention, layer_input, layer_inputs, reading_attention, sources_of
from srv.models.families.builders.sandwich import local_rope, with_rope_of
from srv.models.layers.moe_config import ROUTER, Routing
from srv.models.layers.rope_config import rope_config
from srv.models.unsupported import UnsupportedConfig, refuse_unless

GLOBAL_DIM = 512  # of heads in layers with full attention, where no field says it
_ROPE = MappingProxyType(
    {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    }
)
# Of images, tokens may attend to later ones; of text, they do not.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": ("vision",),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    config = {**config, "rope_parameters": config.get("rope_parameters") or _ROPE, "layer_types": _kinds(config)}
    sizes = decoder_sizes(
        with_rope_of(config, "sliding_attention", "rope_local_base_freq"),
        reads=("hidden_act", "final_logit_softcapping", "num_experts", "num_local_experts"),
    )
    sizes = sizes._replace(rope=local_rope(config, sizes.head_dim, "rope_local_base_freq"))
    windows, bias, small = windows_of_pattern(config, sizes.layers), bool(config["attention_bias"]), _small(config)
    sources = sources_of(windows, int(config["num_kv_shared_layers"]))
    experts = _experts(config, sizes) if config["enable_moe_block"] else None
    own = (layer_input(sizes, small),) if small else ()
    before_mixer, after_mixer, before_mlp, after_mlp = (
        Norm(sizes.hidden_size, sizes.norm_eps, adds=adds, name=name)
        for name, adds in (
            (parts.BEFORE_MIXER, True),
            (parts.BEFORE_MLP, False),
            ("pre_feedforward_layernorm", True),
            ("post_feedforward_layernorm", False),
        )
    )
    after = (after_mlp, *(() if experts is None else (experts,)), *own, LayerScale({"layer_scalar": (1,)}))

    def layer(kind: tuple[Sizes, int | None, int | None, bool]) -> Layer:
        of_kind, window, source, kept = kind
        mixer = _attention(config, of_kind, bias, window, kept)
        wide = source is not None and config["use_double_wide_mlp"]
        mlp = parts.mlp(sizes, activation="gelu_tanh_gated", inner=sizes.intermediate_size * (1 + bool(wide)))
        mixers = (mixer if source is None else reading_attention(mixer, source),)
        return Layer((before_mixer,), mixers, (after_mixer, before_mlp), mlp, after, "scaled")

    kept = [index in sources for index in range(sizes.layers)]
    kinds = zip(_sizes_of_layers(config, sizes, windows), windows, sources, kept, strict=True)
    before = (layer_inputs(sizes, int(config["vocab_size_per_layer_input"]), small),) if small else ()
    return parts.decoder(
        sizes,
        alike(kinds, layer),
        parts.last_norm(sizes, adds=False),
        before=before,
        factor=sizes.hidden_size**0.5,
        factor_dtype="",
        logits_soft_cap=soft_cap(config, "final_logit_softcapping"),
    )


def unified(config: Mapping[str, Any]) -> Part:
    """Its class reads no fields of inputs of layers and of experts."""
    return tree({**config, "hidden_size_per_layer_input": 0, "enable_moe_block": False})


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The last layer has full attention, whatever the field says."""
    layers, stated = int(config["num_hidden_layers"]), config.get("layer_types")
    if stated is None:
        stated = [("full_attention" if (index + 1) % 6 == 0 else "sliding_attention") for index in range(layers)]
    return [*stated[:-1], "full_attention"]


def _small(config: Mapping[str, Any]) -> int:
    return int(config["hidden_size_per_layer_input"] or 0)


def _sizes_of_layers(config: Mapping[str, Any], sizes: Sizes, windows: tuple[int | None, ...]) -> list[Sizes]:
    """Facts: `per_layer_config` of transformers has the heads of layers with full attention; published files have
    fields of their own."""
    stated, full = config.get("per_layer_config"), with_rope_of(config, "full_attention", "rope_theta")
    heads = config.get("num_global_key_value_heads") if config["attention_k_eq_v"] else None
    common = {"head_dim": config.get("global_head_dim") or GLOBAL_DIM, "num_key_value_heads": heads}

    def of_layer(index: int, window: int | None) -> Sizes:
        own = stated.get(str(index), {}) if isinstance(stated, Mapping) else {} if window else common
        if others := sorted(set(own) - {"head_dim", "num_key_value_heads"}):
            raise UnsupportedConfig(f"per_layer_config has {', '.join(others)} of layer {index}")
        dim, kv_heads = (
            int(own.get("head_dim") or sizes.head_dim),
            int(own.get("num_key_value_heads") or sizes.kv_heads),
        )
        if sizes.heads % kv_heads:
            raise UnsupportedConfig(f"{sizes.heads} attention heads are not a multiple of {kv_heads} key heads")
        if window is not None and dim != sizes.head_dim:
            raise UnsupportedConfig(f"per_layer_config gives layer {index}, which has a window, heads of {dim}")
        rope = sizes.rope if window is not None else rope_config(full, dim)
        return sizes._replace(head_dim=dim, kv_heads=kv_heads, rope=rope)

    return [of_layer(index, window) for index, window in enumerate(windows)]


def _attention(config: Mapping[str, Any], sizes: Sizes, bias: bool, window: int | None, kept: bool) -> Attention:
    made = attention(sizes, bias, window, kept=kept)
    if window is not None or not config["attention_k_eq_v"]:
        return made
    outputs = {name: made.qkv.outputs[name] for name in ("q_proj", "k_proj")}
    return dataclasses.replace(made, qkv=dataclasses.replace(made.qkv, outputs=outputs), keys_are_values=True)


def _experts(config: Mapping[str, Any], sizes: Sizes) -> SideExperts:
    count, used, inner = (int(config[name] or 0) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    if not 0 < used <= count:
        raise UnsupportedConfig(f"top_k_experts = {used} of {count} experts is not possible")
    if inner < 1:
        raise UnsupportedConfig(f"moe_intermediate_size = {inner} is not a size")
    routing = Routing(used, renormalize=True)
    made = parts.mixture(sizes, count, inner, routing, router="router.proj", activation="gelu_tanh")
    after_mlp, after, before = (
        Norm(sizes.hidden_size, sizes.norm_eps, name=name)
        for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    )
    scales = Tensors({"router.scale": (sizes.hidden_size,), "router.per_expert_scale": (count,)})
    router = Linear({"router.proj": count}, sizes.hidden_size, role=ROUTER)
    return SideExperts(
        router,
        None,
        None,
        None,
        made.experts,
        routing,
        router_norm=Norm(sizes.hidden_size, sizes.norm_eps, learned=False),
        scales=scales,
        before=before,
        after=after,
        beside=after_mlp,
    )


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 512,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}
TEXT = Architecture(name="Gemma4ForCausalLM", tree=tree, defaults=_DEFAULTS, model_type="gemma4_text")
UNIFIED = Architecture(
    name="Gemma4UnifiedForCausalLM",
    tree=unified,
    defaults={**_DEFAULTS, "max_position_embeddings": 262144, "sliding_window": 1024},
    model_type="gemma4_unified_text",
)
