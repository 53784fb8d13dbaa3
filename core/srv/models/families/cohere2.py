"""Cohere 2 (Command R7B, Command A): Cohere with a window in three of four layers.

Only the layers with a window have a rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import windows_of_pattern
from srv.models.families.cohere import COHERE_DEFAULTS, GGUF_FIELDS, WEIGHTS, cohere_sizes, parallel

PATTERN = 4  # every fourth layer has full attention


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = cohere_sizes(config), bool(config["attention_bias"])
    windows = windows_of_pattern(config, sizes.layers)

    def attention(window: int | None) -> Attention:
        return parts.attention(sizes, bias=bias, rotated=window is not None, window=window)

    return parallel(config, sizes, alike(windows, attention))


ARCHITECTURE = Architecture(
    name="Cohere2ForCausalLM",
    tree=tree,
    defaults={**COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": PATTERN},
    gguf=GGUFLayout(
        "cohere2",
        weights=WEIGHTS,
        fields={**GGUF_FIELDS, "attention.sliding_window": "sliding_window"},
    ),
    weights=WEIGHTS,
)
