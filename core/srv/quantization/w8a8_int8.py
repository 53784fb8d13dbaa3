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
from typing import TYPE_CHECKING, Any

from srv.quantization.description import QuantDescription
from srv.quantization.method import QuantMethod, StoredModel

if TYPE_CHECKING:
    from srv.specs import ModelFacts

NAME = "w8a8_int8"
INT8 = "W8A8_DYNAMIC"
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


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    """Whether a `quantization_config` describes this method.

    compressed-tensors covers many schemes, of which this method is one; the reason if it is another one.
    """
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return False
    if stated.get("quant_method") == COMPRESSED_TENSORS:
        return unsupported_reason(stated) or True
    return bool(stated.get("quant_method") == NAME)


def accepts(model: ModelFacts) -> str | None:
    """Why a checkpoint that names no method is not of this one."""
    return None if model.stored_types.get("int8") else f"none of the weights of {model.path} are 8-bit integers"


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


def read_description(model: StoredModel) -> QuantDescription:
    """The quantization types of a checkpoint's layers.

    They follow from the dtypes of the stored tensors; without weights, from the configuration and the number of layers.
    """
    facts = model.facts
    if model.types:
        int8_names = (name for name, dtype in model.types.items() if dtype == "int8")
        return QuantDescription(facts.path, {name: INT8 for name in int8_names if name.endswith(".weight")})
    names = [f"model.layers.{index}.{projection}" for index in range(facts.layers) for projection in PROJECTIONS]
    quantization_config = facts.config.get("quantization_config")
    declared = quantization_config if isinstance(quantization_config, Mapping) else {"ignore": (_LM_HEAD,)}
    ignored = declared.get("ignore") or ()
    quantized = (name for name in (*names, _LM_HEAD) if not _matches(name, ignored))
    return QuantDescription(str(Path(facts.path) / "config.json"), {f"{name}.weight": INT8 for name in quantized})


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern equals the name, or is a regular expression ("re:...") that matches its beginning."""
    return any(
        re.match(pattern.removeprefix("re:"), name) is not None if pattern.startswith("re:") else pattern == name
        for pattern in patterns
    )


METHOD = QuantMethod(
    name=NAME,
    layers="srv.quantization.w8a8_int8_layers:W8A8LayerFactory",
    storage="srv.quantization.w8a8_int8_layers:W8A8StorageFormat",
    ops=("linear_w8a8",),
    detect=detect,
    accepts=accepts,
    sharding="weights quantized to int8 cannot be sharded yet",
)
