"""The rules of a GGUF file with the sizes of its model. Torch-free."""

from __future__ import annotations

from srv.models.checkpoints.row_orders import SizedRules
from srv.models.facts.attention_layers import attention_layers
from srv.models.families.registry import gguf_layout, with_defaults
from srv.specs import ModelFacts


def gguf_rules(facts: ModelFacts) -> SizedRules:
    """`facts`: of the whole model."""
    layout = gguf_layout(facts.architecture)
    layers, fields = attention_layers(facts), with_defaults(facts.architecture, facts.config)
    mapping, rotary_dim = layout.mapping(fields), 0
    rotary = mapping.rotary
    if rotary is not None and layers:
        rotary_dim = layers[0].head_dim if rotary.dims is None else rotary.dims(fields)
    return SizedRules(mapping, layers, rotary_dim, stored_orders=layout.orders(fields) if layout.orders else {})
