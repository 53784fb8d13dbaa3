"""Checkpoints of the method w8a8_int8: which layers are in 8 bits, and what says so. Torch-free.

Owns the layout that many tools write, and the description of compressed-tensors that announces it. Must not know
layers.

    weight         int8 [out, in]; a layer whose weight is no int8 is plain
    weight_scale   a float [out, 1] or [out]: what a step of each output's weights is worth, about 0
    activations    rounded as the model runs, each token by its own largest magnitude, about 0

(Format: https://github.com/vllm-project/compressed-tensors, `int-quantized`)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from srv.models.modelslim import DYNAMIC, Description
from srv.models.safetensors_header import read_checkpoint

NAME = "w8a8_int8"
COMPRESSED = "compressed-tensors"
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_HEAD = "lm_head"
_SCHEME: Mapping[str, Mapping[str, tuple[Any, ...]]] = {  # what each part of a group must say; None: it says nothing
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


def method(told: Mapping[str, Any]) -> str:
    """The name of the method that a `quantization_config` describes; NAME only where that is unmistakable."""
    named = str(told.get("quant_method", "unknown"))
    return NAME if named == COMPRESSED and against(told) is None else named


def against(told: Mapping[str, Any]) -> str | None:
    """Why a description of compressed-tensors is not of this method: the first thing that is otherwise, or None."""
    if told.get("format") != "int-quantized":
        return f"its format is {told.get('format')}, not int-quantized"
    for name in ("kv_cache_scheme", "transform_config"):
        if told.get(name):
            return f"it has a {name}"
    sparsity = told.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse, in the format {sparsity['format']}"
    groups = told.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "it has no config_groups"
    reasons = (_against_group(name, group) for name, group in groups.items())
    return next((reason for reason in reasons if reason is not None), None)


def _against_group(name: str, group: Any) -> str | None:
    if not isinstance(group, Mapping):
        return f"its {name} is {group!r}"
    if group.get("output_activations"):
        return f"its {name} rounds the results of layers, too (output_activations)"
    if group.get("format") not in (None, "int-quantized"):
        return f"its {name} has the format {group['format']}, not int-quantized"
    for part, wanted in _SCHEME.items():
        said = group.get(part)
        if not isinstance(said, Mapping):
            return f"its {name} says nothing of {part}"
        for key, values in wanted.items():
            if said.get(key) not in values:
                return f"its {name} has {part} with {key} {said.get(key)}, not {values[0]}"
    return None


def read_description(folder: Path, config: Mapping[str, Any], layers: int) -> Description:
    """The kinds of a checkpoint's layers, by the types of its tensors; without weights, as its configuration says."""
    checkpoint = read_checkpoint(folder)
    if checkpoint is not None:
        whole = {name for name, tensor in checkpoint.tensors.items() if tensor.dtype == "int8"}
        return Description(str(folder), {name: DYNAMIC for name in whole if name.endswith(".weight")})
    names = [f"model.layers.{index}.{projection}" for index in range(layers) for projection in PROJECTIONS]
    told = config.get("quantization_config")
    ignored = told.get("ignore") or () if isinstance(told, Mapping) else (_HEAD,)
    kept = (name for name in (*names, _HEAD) if not _matches(name, ignored))
    return Description(str(folder / "config.json"), {f"{name}.weight": DYNAMIC for name in kept})


def rounded_at_load(name: str) -> bool:
    """Whether a layer is one of those that are rounded as they are loaded, where that is asked for.

    They are the projections within layers, as in other servers that take `--torchao-config`; never the output layer.
    """
    return name.endswith("_proj")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is the name, or a regular expression ("re:...") for its beginning."""
    return any(
        re.match(pattern.removeprefix("re:"), name) is not None if pattern.startswith("re:") else pattern == name
        for pattern in patterns
    )
