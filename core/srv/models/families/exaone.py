"""EXAONE 4: norms of heads, and a window in most layers, which alone rotate. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes, one_window, windows_of_pattern
from srv.models.families.builders.sandwich import sandwich_decoder
from srv.models.unsupported import UnsupportedConfig


def tree(config: Mapping[str, Any]) -> Part:
    """Norms after attention and MLP."""
    sizes = decoder_sizes(config)
    return sandwich_decoder(sizes, attention_of_layers(config, sizes), parts.mlp(sizes), before=False)


def attention_of_layers(config: Mapping[str, Any], sizes: Sizes) -> tuple[Attention, ...]:
    """Norms of heads; if a window is stated, layers without it have no rotation."""
    window, norms = one_window(config), parts.head_norms(sizes)

    def attention(of_layer: int | None) -> Attention:
        return parts.attention(sizes, norms=norms, rotated=window is None or of_layer is not None, window=of_layer)

    return alike(_windows(config, sizes.layers, window), attention)


def _windows(config: Mapping[str, Any], layers: int, window: int | None) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types`, else by `sliding_window_pattern`.

    That is a number, every such layer having full attention, or letters that take turns: L for a window, and G for
    none. With letters, the last layer has no window.
    """
    pattern = config.get("sliding_window_pattern")
    if config.get("layer_types") is None and (window is None or not pattern):
        return (None,) * layers
    if config.get("layer_types") is not None or not isinstance(pattern, str):
        return windows_of_pattern(config, layers)
    if set(pattern) - {"L", "G"}:
        raise UnsupportedConfig(f"sliding_window_pattern = {pattern!r} has other letters than L and G")
    return tuple(window if pattern[i % len(pattern)] == "L" and i < layers - 1 else None for i in range(layers))


EXAONE_DEFAULTS: dict[str, Any] = {
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
}
ARCHITECTURE = Architecture(name="Exaone4ForCausalLM", tree=tree, defaults={**EXAONE_DEFAULTS, "eos_token_id": 2})
