"""Qwen2 and Qwen2.5: biases of queries, keys and values, and sliding windows that are usually off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, windows_of_types

QWEN_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def tree(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(config)

    def attention(window: int | None) -> Attention:
        return parts.attention(sizes, bias=True, output_bias=False, window=window)

    return parts.decoder(sizes, parts.pre_norm_layers(sizes, alike(windows(config), attention), parts.mlp(sizes)))


def windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer: by `layer_types`, or in the layers from `max_window_layers` on."""
    layers, window = int(config["num_hidden_layers"]), config["sliding_window"]
    if window is None or window < 1 or not config["use_sliding_window"]:
        return (None,) * layers
    first = int(config["max_window_layers"])
    types = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    return windows_of_types(types, layers, int(window))


ARCHITECTURE = Architecture(
    name="Qwen2ForCausalLM",
    tree=tree,
    defaults=QWEN_DEFAULTS,
    gguf=GGUFLayout("qwen2"),
)
