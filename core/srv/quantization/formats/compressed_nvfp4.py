"""Checkpoints of compressed-tensors in NVFP4 (`nvfp4-pack-quantized`): how they state it. Torch-free.

Owns checkpoints whose quantized layers are all in NVFP4, whether inputs are stated to be as well or not. Must not know
what NVFP4 is, which is in `srv.quantization.formats.nvfp4`.

(Format: the source code of compressed-tensors and llm-compressor)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import stated_names
from srv.quantization.formats.nvfp4 import GROUP, NVFP4, NvFp4Checkpoint, NvFp4Form, NvFp4Names, nvfp4_method
from srv.quantization.formats.packed_integers import LINEAR
from srv.quantization.method import StoredModel

FORMAT = "nvfp4-pack-quantized"
NAMES = NvFp4Names("weight_packed", "weight_global_scale", "input_global_scale", inverse=True)
_WEIGHTS: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("float",),
    "symmetric": (True, None),
    "strategy": ("tensor_group",),
    "group_size": (GROUP,),
}


def read(config: Mapping[str, Any]) -> NvFp4Form | str | None:
    """The form of a checkpoint; a clause if layers do not support it; None if its layers have other formats."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping) or str(stated.get("quant_method", "")).lower() != "compressed-tensors":
        return None
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(each, Mapping) for each in groups.values()):
        return None
    if {str(group.get("format") or stated.get("format")) for group in groups.values()} != {FORMAT}:
        return None
    try:
        return _read(stated, groups)
    except (TypeError, ValueError, AttributeError) as error:
        return f"its quantization_config has an invalid value ({error})"


def _read(stated: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> NvFp4Form | str:
    if (refused := unsupported_kv_scheme(stated)) is not None:
        return refused
    if stated.get("transform_config"):
        return "it has a transform_config"
    if (stated.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return f"its weights are sparse, in the format {stated['sparsity_config']['format']}"
    for name, group in groups.items():
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            return f"its {name} has no weights"
        if group.get("output_activations"):
            return f"its {name} quantizes the outputs of layers as well (output_activations)"
        for key, values in _WEIGHTS.items():
            if weights.get(key) not in values:
                return f"its {name} has weights with {key} {weights.get(key)}, not {values[0]}, as {NVFP4} has"
    targets = [target for group in groups.values() for target in stated_names(group, "targets")]
    if targets != [LINEAR]:
        return f"its groups have the targets {', '.join(targets)}, not {LINEAR}"
    return NvFp4Form(stated_names(stated, "ignore"))


def checkpoint(model: StoredModel) -> NvFp4Checkpoint:
    form = read(model.facts.config)
    return NvFp4Checkpoint(model, NAMES, form.excluded if isinstance(form, NvFp4Form) else ())


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str | None:
    """As `QuantMethod.detect`; None if the layers of a checkpoint have other formats."""
    form = read(config)
    return form if form is None or isinstance(form, str) else True


METHOD = nvfp4_method("compressed-tensors", checkpoint, "srv.quantization.formats.compressed_nvfp4_storage")
