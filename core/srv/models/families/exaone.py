"""EXAONE 4: norms of heads, and a window in most layers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, one_window, windows_of_types
from srv.models.families.builders.sandwich import sandwich_decoder
from srv.models.families.builders.without_layers import FULL, SLIDING, every
from srv.models.unsupported import UnsupportedConfig


def exaone4(config: Mapping[str, Any]) -> Part:
    """Norms after attention and MLP, and norms of heads; if layers have windows, the others have no rotation."""
    sizes, window = decoder_sizes(config), one_window(config)
    norms = parts.head_norms(sizes)

    def attention(of_layer: int | None) -> Attention:
        return parts.attention(sizes, norms=norms, rotated=window is None or of_layer is not None, window=of_layer)

    windows = windows_of_types(_kinds(config, sizes.layers), sizes.layers, window or 0)
    return sandwich_decoder(sizes, alike(windows, attention), parts.mlp(sizes), before=False)


def _kinds(config: Mapping[str, Any], layers: int) -> Sequence[str]:
    """The kind of each layer: by `layer_types`, else by `sliding_window_pattern`.

    That is a number, every such layer having full attention, or letters that take turns: L for a window, and G for
    none. With letters, the last layer has no window.
    """
    stated, pattern, window = config.get("layer_types"), config.get("sliding_window_pattern"), one_window(config)
    if stated is not None:
        if window is None and SLIDING in stated:
            raise UnsupportedConfig("layer_types with sliding_attention without a sliding_window is not implemented")
        return list(stated)
    if window is None or not pattern:
        return [FULL] * layers
    if isinstance(pattern, str):
        slides = [pattern[index % len(pattern)] == "L" and index < layers - 1 for index in range(layers)]
        return [SLIDING if each else FULL for each in slides]
    return [every(int(pattern))(index) for index in range(layers)]


DENSE = Architecture(
    name="Exaone4ForCausalLM",
    tree=exaone4,
    defaults={
        **DEFAULTS,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "eos_token_id": 2,
    },
)
