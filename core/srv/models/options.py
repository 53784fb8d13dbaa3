"""What the user says of a model's files, and a configuration with the user's other values. Torch-free.

Must not know which fields there are: `srv.models.config.overrides` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

ROPE = "rope_parameters"
# Fields that transformers 5 stores in `rope_parameters`, and earlier versions beside it.
IN_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
NESTED = "text_config"  # the configuration of a language model within that of a larger one
TIED = "tie_word_embeddings"
UNTIED: Mapping[str, Any] = MappingProxyType({TIED: False})
_NONE: Mapping[str, Any] = MappingProxyType({})


class ReadOptions(NamedTuple):
    """`overrides`: fields of the model's configuration, with other values.

    `remote_code`: whether Python code in its folder may be run. `headers_only`: its weight files are holes behind their
    headers, so that no weight may be read.
    """

    overrides: Mapping[str, Any] = _NONE
    remote_code: bool = False
    headers_only: bool = False


DEFAULT_OPTIONS = ReadOptions()


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with other values of some fields, also where it nests them for its language model."""
    inner, changed = config.get(NESTED), _replaced(config, overrides)
    if isinstance(inner, Mapping) and NESTED not in overrides:
        also = IN_ROPE if inner.get(ROPE) else ()
        own = {name: value for name, value in overrides.items() if name in inner or name in also}
        changed[NESTED] = _replaced(inner, own)
    return changed


def rope_by_kind(config: Mapping[str, Any]) -> bool:
    """Whether the configuration has RoPE parameters for each kind of layer."""
    rope = config.get(ROPE)
    return isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values())


def _replaced(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with other values, RoPE's where it has them: the layers read those in `rope_parameters`."""
    changed, rope = {**config, **overrides}, config.get(ROPE)
    stated = {name: overrides[name] for name in IN_ROPE if name in overrides}
    if not stated or ROPE in overrides or not isinstance(rope, Mapping) or not rope:
        return changed
    if "rope_scaling" in stated:
        del changed["rope_scaling"]
        scaling = stated.pop("rope_scaling") or {}
        kept = {name: rope[name] for name in IN_ROPE if name in rope}
        rope = {**kept, **scaling, "rope_type": scaling.get("rope_type") or scaling.get("type") or "default"}
    changed[ROPE] = {**rope, **stated}
    return changed
