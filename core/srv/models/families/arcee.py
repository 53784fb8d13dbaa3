"""Arcee: Llama with squared ReLU. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, sizes, uniform


def arcee(c: Mapping[str, Any]) -> Part:
    base = sizes(c)
    return uniform(
        base, parts.attention(base, bias=bool(c["attention_bias"])), parts.mlp(base, bool(c["mlp_bias"]), "relu2")
    )


ARCHITECTURE = Architecture(
    name="ArceeForCausalLM",
    tree=arcee,
    defaults=common(32000, 2560, 18432, 32, 32, None, 4096, mlp_bias=False),
    layers=None,
    model_type="arcee",
)
