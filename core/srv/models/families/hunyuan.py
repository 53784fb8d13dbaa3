"""Hunyuan without experts: norms of heads. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, sizes, uniform


def hunyuan(c: Mapping[str, Any]) -> Part:
    base = sizes(c)
    return uniform(
        base, parts.attention(base, norms=parts.head_norms(base), bias=bool(c["attention_bias"])), parts.mlp(base)
    )


DENSE = Architecture(
    name="HunYuanDenseV1ForCausalLM",
    tree=hunyuan,
    defaults=common(290943, 4096, 11008, 32, 32, None, 2048),
    layers=None,
    model_type="hunyuan_v1_dense",
)
