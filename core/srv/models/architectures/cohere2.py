"""Cohere 2 (Command R7B, Command A): Cohere with a window in three of four layers.

Only the layers with a window have a rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.cohere import COHERE_DEFAULTS, WEIGHTS, decoder, parallel
from srv.models.architectures.decoder_config import windows_of_pattern
from srv.models.architectures.layer_norm_config import LayerNormConfig

PATTERN = 4  # every fourth layer has full attention


def make_config(config: Mapping[str, Any]) -> LayerNormConfig:
    base = decoder(config)
    windows = windows_of_pattern(config, base.layers)
    return parallel(base.replace(windows=windows, rotated=tuple(window is not None for window in windows)))


ARCHITECTURE = Architecture(
    name="Cohere2ForCausalLM",
    make_config=make_config,
    defaults={**COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": PATTERN},
    weights=WEIGHTS,
)
