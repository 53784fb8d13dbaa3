"""Apertus: norms of heads, and an activation with parameters. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part, Tensors
from srv.models.blueprint.without_layers import LearnedMLP
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, sizes


def apertus(c: Mapping[str, Any]) -> Part:
    """The activation xIELU has two parameters per layer, and two constants that are stored."""
    base = sizes(c)
    mlp = parts.mlp(base, activation="xielu")
    if c["hidden_act"] == "xielu":
        shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        learned = Tensors(shapes, name="act_fn")
        mlp = LearnedMLP(mlp.up, mlp.down, mlp.activation, learned=learned, name=mlp.name)
    names = ("attention_layernorm", "feedforward_layernorm")
    mixer = parts.attention(base, norms=parts.head_norms(base), bias=bool(c["attention_bias"]))
    layer = parts.pre_norm(base, mixer, mlp, names=names)
    return parts.decoder(base, (layer,) * base.layers)


ARCHITECTURE = Architecture(
    name="ApertusForCausalLM",
    tree=apertus,
    defaults=common(131072, 4096, 14336, 32, 32, None, 65536, hidden_act="xielu"),
    layers=None,
    model_type="apertus",
)
