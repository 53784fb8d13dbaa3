"""The fields of a small model of every class with native layers, as its config.json has them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import bfloat16_models
import indexed_small
import pooled_models
import published_small
import reference_models
from model_cells import SHAPE
from models_small import SIZES
from transformers import CONFIG_MAPPING, AutoConfig

ATTENDING = {"BambaForCausalLM": {"attn_layer_indices": [1]}, "GraniteMoeHybridForCausalLM": {"layer_types": None}}
INDEXED = {
    "v32": "DeepseekV32ForCausalLM",
    "glm": "GlmMoeDsaForCausalLM",
    "axk2": "AXK2ForCausalLM",
    "hy": "HYV4ForCausalLM",
}


@functools.cache
def configurations() -> dict[str, dict[str, Any]]:
    """The fields of a small model of every class with native layers."""
    found: dict[str, dict[str, Any]] = {}
    for name, model in bfloat16_models.MODELS.items():
        fields = {**SIZES, **SHAPE, **model.fields, **ATTENDING.get(name, {})}
        if name == "GraniteMoeHybridForCausalLM":
            fields["layer_types"] = ["mamba", "attention", "mamba"][: fields["num_hidden_layers"]]
        if model.kind in reference_models.FAMILIES:
            found[name] = reference_models.fields_of(model.kind, fields)
            continue
        if isinstance(getattr(CONFIG_MAPPING[model.kind], "head_dim", None), property):
            del fields["head_dim"]
        found[name] = AutoConfig.for_model(model.kind, **fields).to_dict()
    for kind, family in reference_models.FAMILIES.items():
        found.setdefault(family.name, reference_models.fields_of(kind, {**SIZES, **SHAPE}))
    for kind, name in INDEXED.items():
        found[name] = indexed_small.MODELS[kind]().to_dict()
    for model_class, config, fields in pooled_models.MODELS.values():
        found.setdefault(model_class.__name__, config(**fields).to_dict())
    return found | {name: model.config for name, model in published_small.MODELS.items()}


# Sizes that are odd, or of three heads, and what two ranks divide in place of them.
_EVEN = {97: 96, 90: 96, 3: 4}
_DIVIDED = ("vocab_size", "vocab_size_per_layer_input", "num_attention_heads", "n_heads")


def for_two_ranks(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with sizes that two ranks divide."""
    return {name: _EVEN.get(value, value) if name in _DIVIDED else value for name, value in fields.items()}
