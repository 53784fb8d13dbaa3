"""Ministral and Ministral 3: Mistral with windows by kind of layer. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import SLIDING, attention_of_layers, common, sizes, windows


def ministral(c: Mapping[str, Any]) -> Part:
    return _windowed(c, windows(c, lambda index: SLIDING))


def ministral3(c: Mapping[str, Any]) -> Part:
    return _windowed(c, (c["sliding_window"],) * c["num_hidden_layers"])


def _windowed(c: Mapping[str, Any], each: tuple[int | None, ...]) -> Part:
    base = sizes(c)
    return parts.decoder(base, parts.pre_norm_layers(base, attention_of_layers(base, each), parts.mlp(base)))


MINISTRAL = Architecture(
    name="MinistralForCausalLM",
    tree=ministral,
    defaults=common(32000, 4096, 14336, 32, 32, 8, 131072, sliding_window=4096),
    layers=None,
    model_type="ministral",
)
MINISTRAL3 = Architecture(
    name="Ministral3ForCausalLM",
    tree=ministral3,
    defaults=common(131072, 4096, 14336, 34, 32, 8, 262144, head_dim=128, sliding_window=None),
    layers=None,
    model_type="ministral3",
)
