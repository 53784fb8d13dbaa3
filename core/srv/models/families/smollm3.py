"""SmolLM3: Llama in which every fourth layer has no rotary embedding (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466).

llama.cpp writes neither the interval nor windows into GGUF files, and computes with an interval of four.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, windows_of_types
from srv.models.unsupported import UnsupportedConfig


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config, reads=("no_rope_layers",)), bool(config["attention_bias"])

    def attention(kind: tuple[bool, int | None]) -> Attention:
        is_rotated, window = kind
        return parts.attention(sizes, bias=bias, rotated=is_rotated, window=window)

    rotated = _rotated(config, sizes.layers)
    attentions = alike(zip(rotated, _windows(config, rotated), strict=True), attention)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attentions, parts.mlp(sizes, bool(config["mlp_bias"]))))


def _rotated(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have a rotary embedding. Despite its name, a 1 in `no_rope_layers` means that the layer has one."""
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = int(config["no_rope_layer_interval"])
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if len(listed) < layers:
        raise UnsupportedConfig(f"no_rope_layers has {len(listed)} entries for {layers} layers")
    return tuple(bool(has_rope) for has_rope in listed[:layers])


def _windows(config: Mapping[str, Any], rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The sliding window of each layer: by `layer_types`, or in the layers without a rotary embedding."""
    types, window = config.get("layer_types"), config.get("sliding_window")
    if window is None or not config["use_sliding_window"]:
        if types is not None and set(types) != {"full_attention"}:
            raise UnsupportedConfig(f"layer_types = {types!r} without a sliding window is not implemented natively")
        return (None,) * len(rotated)
    if types is None:
        types = ["full_attention" if has_rope else "sliding_attention" for has_rope in rotated]
    return windows_of_types(types, len(rotated), int(window))


ARCHITECTURE = Architecture(
    name="SmolLM3ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
    gguf=GGUFLayout("smollm3", weights=(PermuteRotary(),)),
)
