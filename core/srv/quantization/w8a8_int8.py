"""Checkpoints of the method w8a8_int8: which layers are int8, and how that is recognised. Torch-free.

Owns the layout that many tools write, and the `quantization_config` of compressed-tensors that describes it. Must not
know layers.

    weight         int8 [out, in]; a layer with a weight of another dtype is not quantized
    weight_scale   a float per output channel, [out, 1] or [out], of symmetric quantization
    activations    quantized at run time, symmetrically, with one scale per token

(Format: https://github.com/vllm-project/compressed-tensors, `int-quantized`)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srv.dtypes import FLOATS
from srv.quantization.description import UNQUANTIZED, QuantDescription
from srv.quantization.int8_online import INT8DQ
from srv.quantization.kv_scheme import unsupported_kv_scheme
from srv.quantization.layer_patterns import names_layer, stated_names
from srv.quantization.method import LayerOps, QuantMethod, StoredModel

if TYPE_CHECKING:
    from srv.specs import ModelFacts

NAME = "w8a8_int8"
INT8 = "W8A8_DYNAMIC"
COMPRESSED_TENSORS = "compressed-tensors"
# Those of other methods: `srv.quantization.packed`, `fp8` and `mxfp4`.
OTHER_FORMATS = ("pack-quantized", "float-quantized", "mxfp4-pack-quantized")
_LM_HEAD = "lm_head"
_DTYPE = "int8"
# The linear layers within decoder layers, by their names; not routers and gates, which tools leave as they are, nor
# `kv_b_proj`, which is no linear layer here.
_LINEAR = ("_proj", "_proj_with_mqa", ".in_proj_qkvz", ".in_proj_ba")
_NOT_LINEAR = ".kv_b_proj"
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
        return False if stated.get("format") in OTHER_FORMATS else unsupported_reason(stated) or True
    return stated.get("quant_method") == NAME and (_unsupported_names(stated) or True)


def accepts(model: ModelFacts) -> str | None:
    """Why the weights of a checkpoint that names no method are neither int8, nor can be quantized at load."""
    others = sorted(model.stored_types.keys() - FLOATS)
    return None if model.stored_types.get(_DTYPE) or not others else f"some of its weights are stored as {others[0]}"


def _at_load(model: ModelFacts) -> str | None:
    return None if model.stored_types.get(_DTYPE) else INT8DQ.name


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """The first reason why a `quantization_config` of compressed-tensors is not of this method, or None."""
    if config.get("format") != "int-quantized":
        return f"its format is {config.get('format')}, not {', '.join(OTHER_FORMATS)} or int-quantized"
    if (refused := unsupported_kv_scheme(config)) is not None:
        return refused
    if config.get("transform_config"):
        return "it has a transform_config"
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse, in the format {sparsity['format']}"
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "it has no config_groups"
    if (refused := _unsupported_names(config)) is not None:
        return refused
    reasons = (unsupported_group_reason(name, group) for name, group in groups.items())
    return next((reason for reason in reasons if reason is not None), None)


def _unsupported_names(config: Mapping[str, Any]) -> str | None:
    try:
        stated_names(config, "ignore")
    except ValueError as error:
        return f"its {error}"
    return None


def unsupported_group_reason(name: str, group: Any) -> str | None:
    """The first reason why a group of layers of compressed-tensors is not of this method, or None."""
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


class DeclaredDescription(QuantDescription):
    """The types of layers as a configuration declares them: all linear layers are int8, except those it ignores."""

    def __init__(self, path: str, ignored: Iterable[str]) -> None:
        super().__init__(path, {})
        self._ignored = tuple(ignored)

    def __bool__(self) -> bool:
        return True

    def of_weight(self, name: str) -> str:
        layer = name.removesuffix(".weight")
        linear = layer == _LM_HEAD or (layer.endswith(_LINEAR) and not layer.endswith(_NOT_LINEAR))
        return INT8 if linear and not any(names_layer(each, layer) for each in self._ignored) else UNQUANTIZED


def read_description(model: StoredModel) -> QuantDescription:
    """The quantization types of a checkpoint's layers.

    They follow from the dtypes of the stored tensors; without weights, from the configuration.
    """
    facts = model.facts
    if model.types:
        int8_names = (name for name, dtype in model.types.items() if dtype == "int8")
        return QuantDescription(facts.path, {name: INT8 for name in int8_names if name.endswith(".weight")})
    quantization_config = facts.config.get("quantization_config")
    declared = quantization_config if isinstance(quantization_config, Mapping) else {"ignore": (_LM_HEAD,)}
    return DeclaredDescription(str(Path(facts.path) / "config.json"), stated_names(declared, "ignore"))


def layer_ops(model: StoredModel) -> LayerOps:
    description = read_description(model)
    return lambda names, inputs, rows: "linear_w8a8" if not rows and description.quant_type(names) == INT8 else ""


METHOD = QuantMethod(
    name=NAME,
    layers="srv.quantization.w8a8_int8_layers:W8A8LayerFactory",
    storage="srv.quantization.w8a8_int8_layers:W8A8StorageFormat",
    ops=("linear_w8a8",),
    detect=detect,
    accepts=accepts,
    sharding="weights quantized to int8 cannot be sharded yet",
    layer_ops=layer_ops,
    at_load=_at_load,
)
