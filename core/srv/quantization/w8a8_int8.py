"""Checkpoints of the method w8a8_int8: which layers are int8, and how that is recognised. Torch-free.

Owns the layout that many tools write, and the `quantization_config` of compressed-tensors that describes it. Must not
know layers.

    weight         int8 [out, in]; a layer with a weight of another dtype is not quantized
    weight_scale   a float per output channel, [out, 1] or [out], of symmetric quantization
    activations    quantized at run time, symmetrically, with one scale per token

(Format: https://github.com/vllm-project/compressed-tensors, `int-quantized`)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from srv.models.formats.safetensors_header import read_checkpoint
from srv.quantization.modelslim import DYNAMIC, QuantDescription

NAME = "w8a8_int8"
COMPRESSED_TENSORS = "compressed-tensors"
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_LM_HEAD = "lm_head"
# The values that a config group must have for weights and activations; None means that the field is absent.
_REQUIRED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "weights": {
        "num_bits": (8,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("channel",),
        "dynamic": (False, None),
        "group_size": (None,),
        "block_structure": (None,),
    },
    "input_activations": {
        "num_bits": (8,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("token",),
        "dynamic": (True,),
        "group_size": (None,),
        "block_structure": (None,),
    },
}


def method(config: Mapping[str, Any]) -> str:
    """The name of the method that a `quantization_config` describes.

    compressed-tensors covers many schemes; the result is NAME only for the one that this module supports.
    """
    name = str(config.get("quant_method", "unknown"))
    return NAME if name == COMPRESSED_TENSORS and unsupported_reason(config) is None else name


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """The first reason why a `quantization_config` of compressed-tensors is not of this method, or None."""
    if config.get("format") != "int-quantized":
        return f"its format is {config.get('format')}, not int-quantized"
    for name in ("kv_cache_scheme", "transform_config"):
        if config.get(name):
            return f"it has a {name}"
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse, in the format {sparsity['format']}"
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "it has no config_groups"
    reasons = (_unsupported_group_reason(name, group) for name, group in groups.items())
    return next((reason for reason in reasons if reason is not None), None)


def _unsupported_group_reason(name: str, group: Any) -> str | None:
    if not isinstance(group, Mapping):
        return f"its {name} is {group!r}, not an object"
    if group.get("output_activations"):
        return f"its {name} quantizes the outputs of layers as well (output_activations)"
    if group.get("format") not in (None, "int-quantized"):
        return f"its {name} has the format {group['format']}, not int-quantized"
    for section, required in _REQUIRED.items():
        fields = group.get(section)
        if not isinstance(fields, Mapping):
            return f"its {name} has no {section}"
        for key, values in required.items():
            if fields.get(key) not in values:
                return f"its {name} has {section} with {key} {fields.get(key)}, not {values[0]}"
    return None


def read_description(folder: Path, config: Mapping[str, Any], layers: int) -> QuantDescription:
    """The quantization types of a checkpoint's layers.

    They follow from the dtypes of the stored tensors; without weights, from `config` and its number of `layers`.
    """
    checkpoint = read_checkpoint(folder)
    if checkpoint is not None:
        int8_names = {name for name, tensor in checkpoint.tensors.items() if tensor.dtype == "int8"}
        return QuantDescription(str(folder), {name: DYNAMIC for name in int8_names if name.endswith(".weight")})
    names = [f"model.layers.{index}.{projection}" for index in range(layers) for projection in PROJECTIONS]
    quantization_config = config.get("quantization_config")
    declared = quantization_config if isinstance(quantization_config, Mapping) else {"ignore": (_LM_HEAD,)}
    ignored = declared.get("ignore") or ()
    quantized = (name for name in (*names, _LM_HEAD) if not _matches(name, ignored))
    return QuantDescription(str(folder / "config.json"), {f"{name}.weight": DYNAMIC for name in quantized})


def is_quantized_online(name: str) -> bool:
    """Whether online quantization, if requested, applies to the layer of this name.

    It applies to the linear layers within decoder layers, as in SGLang with `--torchao-config`, and never to
    the output layer.
    """
    return name.endswith("_proj")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern equals the name, or is a regular expression ("re:...") that matches its beginning."""
    return any(
        re.match(pattern.removeprefix("re:"), name) is not None if pattern.startswith("re:") else pattern == name
        for pattern in patterns
    )
