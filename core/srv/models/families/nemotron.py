"""Nemotron and Jais 2: layer norms, and two linear layers per MLP. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, normed, sizes


def nemotron(c: Mapping[str, Any]) -> Part:
    """Two linear layers per MLP, and layer norms. Also Jais 2."""
    base = sizes(c)
    return normed(
        base, parts.attention(base, bias=bool(c["attention_bias"])), parts.mlp(base, bool(c["mlp_bias"]), "relu2")
    )


JAIS2 = Architecture(
    name="Jais2ForCausalLM",
    tree=nemotron,
    defaults=common(150272, 3328, 26624, 32, 26, None, 8192, attention_bias=True, mlp_bias=True),
    layers=None,
    model_type="jais2",
)
NEMOTRON = Architecture(
    name="NemotronForCausalLM",
    tree=nemotron,
    defaults=common(256000, 6144, 24576, 32, 48, None, 4096, mlp_bias=False),
    layers=None,
    model_type="nemotron",
)
