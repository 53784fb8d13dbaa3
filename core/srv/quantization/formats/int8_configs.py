"""How configurations of compressed-tensors state int8 weights. Torch-free.

Owns the fields that they have, and which forms layers support. Must not know what is stored.

    weights              symmetric int8 with a scale per output channel, or one for the whole weight (strategy tensor)
    input_activations    dynamic   quantized at run time, symmetrically, with one scale per token
                         static    quantized symmetrically with one scale, which the checkpoint stores
                         none      not quantized: weight-only
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import stated_names
from srv.quantization.schemes import Inputs, Int8

INT, NAIVE = "int-quantized", "naive-quantized"  # formats; the latter has FP8, too
# The values that fields must have; None means that one is absent.
_SYMMETRIC: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "group_size": (None,),
    "block_structure": (None,),
}
_WEIGHTS = {**_SYMMETRIC, "strategy": ("channel", "tensor"), "dynamic": (False, None)}
_DYNAMIC_INPUTS = {**_SYMMETRIC, "strategy": ("token",)}
_STATIC_INPUTS = {**_SYMMETRIC, "strategy": ("tensor",), "dynamic": (False, None)}


class Int8Form(NamedTuple):
    """How int8 layers multiply. inputs: how their inputs are quantized. excluded: patterns of unquantized layers."""

    inputs: Inputs = "dynamic"
    excluded: tuple[str, ...] = ()

    @property
    def held(self) -> Int8:
        """What layers hold the weights as."""
        return Int8(self.inputs)


def read_compressed(stated: Mapping[str, Any], other_formats: tuple[str, ...]) -> Int8Form | str:
    """The scheme of a `quantization_config`, or the first reason why it is not one of int8.

    `other_formats`: those of other methods, which the reason names.
    """
    if stated.get("format") not in (INT, NAIVE):
        return f"its format is {stated.get('format')}, not {', '.join(other_formats)} or {INT}"
    if (refused := unsupported_kv_scheme(stated)) is not None:
        return refused
    if stated.get("transform_config"):
        return "it has a transform_config"
    sparsity = stated.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse, in the format {sparsity['format']}"
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "it has no config_groups"
    if (refused := unsupported_names(stated)) is not None:
        return refused
    first, *others = dict.fromkeys(compressed_group(name, group) for name, group in groups.items())
    if others:  # `srv.quantization.formats.compressed_tensors` serves them
        reasons = (each for each in (first, *others) if isinstance(each, str))
        return next(reasons, "its groups of layers are quantized differently")
    return first if isinstance(first, str) else first._replace(excluded=stated_names(stated, "ignore"))


def unsupported_names(stated: Mapping[str, Any]) -> str | None:
    try:
        stated_names(stated, "ignore")
    except ValueError as error:
        return f"its {error}"
    return None


def compressed_group(name: str, group: Any) -> Int8Form | str:
    """The scheme of one group of layers; a clause if the layers do not support its form."""
    if not isinstance(group, Mapping):
        return f"its {name} is {group!r}, not an object"
    if group.get("output_activations"):
        return f"its {name} quantizes the outputs of layers as well (output_activations)"
    if group.get("format") not in (None, INT, NAIVE):
        return f"its {name} has the format {group['format']}, not {INT}"
    weights, inputs = group.get("weights"), group.get("input_activations") or None
    if not isinstance(weights, Mapping):
        return f"its {name} has no weights"
    if (refused := _refused(name, "weights", weights, _WEIGHTS)) is not None or inputs is None:
        return refused or Int8Form("none")
    if not isinstance(inputs, Mapping):
        return f"its {name} has the input_activations {inputs!r}, which are not an object"
    dynamic = inputs.get("dynamic") is True
    refused = _refused(name, "input_activations", inputs, _DYNAMIC_INPUTS if dynamic else _STATIC_INPUTS)
    return refused or Int8Form("dynamic" if dynamic else "static")


def _refused(name: str, section: str, fields: Mapping[str, Any], required: Mapping[str, tuple[Any, ...]]) -> str | None:
    for key, values in required.items():
        if fields.get(key) not in values:
            allowed = " or ".join(str(value) for value in values if value is not None)
            return f"its {name} has {section} with {key} {fields.get(key)}, not {allowed or None}"
    return None
