"""The attention layers of a model, as its facts and its configuration describe them, before it is built. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.kept import kept_per_object
from srv.models import derive
from srv.models.families.trees import native_tree_of_model
from srv.specs import AttentionLayer, ModelFacts, attention_specs

SINKS = ("flint", "granite_swa", "granitemoe_swa")  # model types with attention sinks in all layers


@kept_per_object
def attention_layers(model: ModelFacts) -> tuple[AttentionLayer, ...]:
    """The attention of each layer, in order; `index` is the number of the layer. Facts of one rank give its heads."""
    tree = native_tree_of_model(model)
    if isinstance(tree, str):  # it runs through transformers
        return _of_facts(model)
    layers = derive.attention_layers(tree)
    ranks = layers[0].heads // model.heads if derive.divided(tree) is not None else 1
    return derive.attention_layers(tree.of_rank(ranks)) if ranks > 1 else layers


def _of_facts(model: ModelFacts) -> tuple[AttentionLayer, ...]:
    """What the facts tell of a model without native layers. Its attention scale is not known, and assumed to be usual.

    Where no field tells which layers have the window of a configuration, all of them may have it.
    """
    nested = model.config.get("text_config")
    config = {**model.config, **nested} if isinstance(nested, dict) else model.config
    cap, types = config.get("attn_logit_softcapping"), config.get("layer_types")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) and types is None else None
    layers = [
        AttentionLayer(
            index=index,
            heads=model.heads,
            kv_heads=group.kv_heads,
            head_dim=group.key_dim,
            scale=group.key_dim**-0.5,
            window=group.window or (window if isinstance(window, int) and window > 0 else None),
            soft_cap=float(cap) if isinstance(cap, (int, float)) and cap else None,
            chunk=_chunk(config, index),
            sinks=config.get("model_type") in SINKS,
            temperature_from=_temperature_from(config),
        )
        for group in attention_specs(model.cache_groups)
        for index in group.layers
    ]
    return tuple(sorted(layers, key=lambda layer: layer.index))


def _temperature_from(config: Mapping[str, Any]) -> int | None:
    first = config.get("attn_temperature_len")
    return first if isinstance(first, int) and first > 1 else None


def _chunk(config: Mapping[str, Any], index: int) -> int | None:
    """The chunk of a layer of Llama 4, in which `layer_types` tells the layers, if it is there."""
    size, types = config.get("attention_chunk_size"), config.get("layer_types")
    if not isinstance(size, int) or size <= 0:
        return None
    return size if not isinstance(types, list) or types[index] == "chunked_attention" else None
