"""EXAONE 4: norms of heads, and a window in most layers. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.sandwich import sandwich_decoder
from srv.models.families.builders.without_layers import (
    attention_of_layers,
    common,
    every,
    sizes,
    windows,
)


def exaone4(c: Mapping[str, Any]) -> Part:
    """Norms after attention and MLP, and norms of heads; most layers may have a window."""
    base = sizes(c)
    mixers = attention_of_layers(base, exaone_windows(c), norms=parts.head_norms(base))
    return sandwich_decoder(base, mixers, parts.mlp(base), before=False)


def exaone_windows(c: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Every `sliding_window_pattern`-th layer has full attention, and all if there is no window."""
    return windows(c, every(c["sliding_window_pattern"] if c["sliding_window"] else 1))


DENSE = Architecture(
    name="Exaone4ForCausalLM",
    tree=exaone4,
    defaults=common(102400, 4096, 16384, 32, 32, 32, 2048, sliding_window=4096, sliding_window_pattern=4),
    layers=None,
    model_type="exaone4",
)
