"""The trees of architectures with native layers, also where these refuse a configuration. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.builders.decoder_fields import UNSUPPORTED_UNLESS
from srv.models.families.family import UnknownSizes
from srv.models.families.registry import native_tree
from srv.models.layers.moe_config import COUNT_FIELDS
from srv.models.layers.rope_config import UnsupportedConfig

# Fields that change what a model computes, but neither its weights nor its cache.
_COMPUTED = {
    *(name for name in UNSUPPORTED_UNLESS if name not in (*COUNT_FIELDS, "no_rope_layers")),
    *("rope_scaling", "rope_parameters", "hidden_activation", "activation_function", "topk_method", "scoring_func"),
    *("n_group", "topk_group", "norm_topk_prob", "swiglu_limit", "use_bidirectional_attention"),
}
_WHOLE_HEADS: Mapping[str, Any] = MappingProxyType({"partial_rotary_factor": 1.0, "rotary_pct": 1.0})


def known_tree(name: str, config: Mapping[str, Any]) -> Part:
    """What a model of native layers is made of.

    A launch refuses what the layers do not compute. The sizes of such a model are known nevertheless, if the fields
    that decide them are implemented. Raises UnknownSizes for the others.
    """
    try:
        return native_tree(name, config)
    except UnsupportedConfig as error:
        reason = str(error)
    try:
        kept = {field: value for field, value in config.items() if field not in _COMPUTED}
        return native_tree(name, {**kept, **_WHOLE_HEADS})
    except UnsupportedConfig as error:
        raise UnknownSizes(f"{reason}: no size is claimed") from error
