"""LongRoPE of classes of transformers, which choose between two lists of factors in each pass.

Owns that a server uses one of them (`srv.models.layers.rope_config`). Must not know the modules of the classes: they
read both lists from the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.layers.rope_config import LEGACY_NAMES

SCALES = ("factor", "mscale")  # each exists as `short_...` and `long_...`


def fix_long_rope(config: Any, context_length: int) -> None:
    """Change a configuration of transformers so that both lists are the one that serves `context_length` tokens."""
    text = config.get_text_config()
    for field in ("rope_parameters", "rope_scaling"):
        stated = getattr(text, field, None)
        if isinstance(stated, Mapping):
            for parameters in (stated, *(each for each in stated.values() if isinstance(each, Mapping))):
                _fix(parameters, text, context_length)


def _fix(parameters: Any, text: Any, context_length: int) -> None:
    rope_type = parameters.get("rope_type") or parameters.get("type")
    if LEGACY_NAMES.get(rope_type, rope_type) != "longrope":
        return
    own = getattr(text, "original_max_position_embeddings", None)
    original = own or parameters.get("original_max_position_embeddings") or text.max_position_embeddings
    kept, other = ("long", "short") if context_length > original else ("short", "long")
    for scale in SCALES:
        if f"{kept}_{scale}" in parameters:
            parameters[f"{other}_{scale}"] = parameters[f"{kept}_{scale}"]
