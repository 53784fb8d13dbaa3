"""What the facts of a model claim of its attention, by which its KV pool is laid out, and whether its class agrees.

Must not know how the attention layers of a class are found.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from srv.errors import listed
from srv.models.transformers.hf_attention import PoolHeads, unsupported
from srv.specs import AttentionLayer, AttentionSpec, ModelFacts, spec_name

NO_BACKENDS = "its class in transformers does not support attention backends"


def check_claims(what: str, layers: Sequence[AttentionLayer], facts: ModelFacts) -> None:
    """The layout of the KV pool follows from the facts, so every layer must match them. Raises ModelError.

    layers: those that were found in the class of `what`, with their numbers in the model.
    """
    if not layers:
        raise unsupported(what, NO_BACKENDS)
    numbers = [layer.index for layer in layers]
    if len(numbers) > facts.layers:
        reason = f"it attends {len(numbers)} times in a pass, but its configuration tells of {facts.layers} layers"
        raise unsupported(what, reason)
    windows: dict[int, int | None] = {}
    for group in facts.cache_groups:
        if not isinstance(group, AttentionSpec):
            raise unsupported(what, f"layers {group.layers} need a {spec_name(group)} cache group")
        windows.update(dict.fromkeys(group.layers, group.window))
    if numbers != sorted(windows):
        found, told = (listed([str(number) for number in each]) for each in (numbers, sorted(windows)))
        raise unsupported(what, f"layers {found} use attention, but its configuration tells of layers {told}")
    pool = pool_heads(facts)
    for index, layer in zip(numbers, layers, strict=True):
        if windows[index] not in (None, layer.window):
            reason = f"layer {index} has a window of {layer.window} tokens, not {windows[index]}"
            if facts.config.get("attention_chunk_size") == windows[index]:
                reason = f"layer {index} attends within chunks of {windows[index]} tokens, by masks of its class"
            raise unsupported(what, reason)
        if (layer.kv_heads, layer.head_dim) != pool[index]:
            found = f"{layer.kv_heads} key heads of {layer.head_dim}"
            reason = f"layer {index} has {found}, not {pool[index].kv_heads} of {pool[index].head_dim}"
            raise unsupported(what, reason)


def pool_heads(facts: ModelFacts) -> dict[int, PoolHeads]:
    """By layer, the heads that its cache group has."""
    groups = (group for group in facts.cache_groups if isinstance(group, AttentionSpec))
    return {index: PoolHeads(group.kv_heads, group.key_dim) for group in groups for index in group.layers}


def masked_windows(model: Any) -> dict[int, int]:
    """The windows that a class has only in the masks that it makes, by layer; attention has no mask here."""
    config = model.config.get_text_config()
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or not hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask"):
        return {}
    return {
        index: window
        for index in range(config.num_hidden_layers)
        if types is None or types[index] == "sliding_attention"
    }
