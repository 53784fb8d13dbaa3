"""How configurations state FP8 weights: those of vLLM and transformers, FBGEMM, ModelOpt and compressed-tensors.

Owns the fields that they have, which forms layers support, and the names of tensors. Torch-free. Must not know what is
stored.

    method              stated by                                           block
    fp8                 quant_method fp8                                    weight_block_size
    fp8                 compressed-tensors, of the format float-quantized   block_structure
    fbgemm_fp8          quant_method fbgemm_fp8                             none
    modelopt            quant_method modelopt, or hf_quant_config.json      128 x 128 for FP8_PB_WO

Activations are unquantized, static or dynamic there. A platform may quantize those of the last two, dynamically.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from srv.errors import ModelError
from srv.quantization.formats.kv_scheme import stated_kv_field, unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import names_layer, stated_names
from srv.quantization.formats.stored_counts import names_of, one_layout
from srv.quantization.method import UP_PROJECTION, StoredCounts
from srv.quantization.schemes import Fp8

FP8, FBGEMM, MODELOPT = "fp8", "fbgemm_fp8", "modelopt"
COMPRESSED_TENSORS = "compressed-tensors"
FORMATS = ("float-quantized", "naive-quantized")  # of compressed-tensors; the latter has integers, too
MODELOPT_FILE = "hf_quant_config.json"
_WEIGHTS_ONLY = "FP8_PB_WO"
_MODELOPT_BLOCKS: Mapping[str, tuple[int, int] | None] = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    _WEIGHTS_ONLY: (128, 128),
}
Scheme = TypeVar("Scheme")
_INPUTS = 32  # blocks have a multiple of so many inputs
# The linear layers within decoder layers, by their names; not routers and gates, which tools leave as they are, nor the
# up-projection, which is no linear layer here.
_LINEAR = ("_proj", "_proj_with_mqa", ".in_proj_qkvz", ".in_proj_ba")
_LM_HEAD = "lm_head"


class Fp8Form(NamedTuple):
    """How the FP8 weights of a checkpoint are stored and scaled.

    block: (outputs, inputs) that share a scale; None: each output has one, or the whole weight. excluded: patterns of
    layers that are not quantized, as the configuration states them. head: the output layer is quantized unless it is
    excluded. weight, scales: the suffixes of stored weights, and those that their scales may have. inputs: it states
    that the inputs of these layers are quantized to FP8 as well, with dynamic or static scales.
    """

    block: tuple[int, int] | None = None
    excluded: tuple[str, ...] = ()
    head: bool = False
    weight: str = "weight"
    scales: tuple[str, ...] = ("weight_scale", "weight_scale_inv")
    inputs: bool = False

    @property
    def held(self) -> Fp8:
        """What layers hold the weights as."""
        return Fp8(self.block)


def scheme_of(folder: Path, config: Mapping[str, Any]) -> Fp8Form:
    """The scheme of a checkpoint; that of a scale per output if its configuration states no method.

    Raises ModelError unsupported_quantization for a form that layers do not support.
    """
    found = scheme_or_reason(folder, config)
    if isinstance(found, Fp8Form):
        return found
    raise ModelError("unsupported_quantization", str(folder), found, "Use another checkpoint of the model")


def scheme_or_reason(folder: Path, config: Mapping[str, Any]) -> Fp8Form | str:
    """As `scheme_of`, with a clause for a form that layers do not support."""
    _, found = _read(folder, config)
    return found or Fp8Form()


def detect(method: str, folder: Path, config: Mapping[str, Any]) -> bool | str:
    """As `QuantMethod.detect`. Raises ModelError (damaged) if ModelOpt's file cannot be read."""
    name, found = _read(folder, config)
    if name != method:
        return False
    return True if isinstance(found, Fp8Form) else found


def kv_field(folder: Path, config: Mapping[str, Any]) -> str:
    """The field by which a checkpoint says that keys and values are 8-bit floats; "" if none does.

    Raises ModelError like `detect`.
    """
    stated = config.get("quantization_config")
    stated = stated if isinstance(stated, Mapping) else _modelopt_file(folder)
    nested = stated.get("quantization")
    return stated_kv_field(stated) or (stated_kv_field(nested) if isinstance(nested, Mapping) else "")


def declares(scheme: Fp8Form, layer: str) -> bool:
    """Whether a configuration without weights says that a layer is quantized."""
    linear = scheme.head if layer == _LM_HEAD else layer.endswith(_LINEAR) and not layer.endswith(UP_PROJECTION)
    return linear and not any(names_layer(pattern, layer) for pattern in scheme.excluded)


def _read(folder: Path, config: Mapping[str, Any]) -> tuple[str, Fp8Form | str]:
    """The method, and its scheme or a clause if layers do not support its form; two empty strings if it is another."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        stated = _modelopt_file(folder)
    method = str(stated.get("quant_method", "")).lower()
    read = _READERS.get(method)
    if method == COMPRESSED_TENSORS and _is_float(stated):
        method, read = FP8, _read_compressed
    if read is None:
        return "", ""
    try:
        return method, read(stated)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        return method, f"its quantization_config has an invalid value ({type(error).__name__}: {error})"


def _modelopt_file(folder: Path) -> Mapping[str, Any]:
    """The contents of ModelOpt's own file as a quantization_config; {} if there is none."""
    path = folder / MODELOPT_FILE
    if not path.is_file():
        return {}
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))["quantization"]
        return {**stated, "quant_method": MODELOPT, "ignore": stated.get("exclude_modules")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it does not describe a quantization ({type(error).__name__}: {error})"
        raise ModelError("damaged", str(path), reason, "Download the file again") from error


def _read_fp8(stated: Mapping[str, Any]) -> Fp8Form | str:
    if str(stated.get("fmt") or "e4m3").lower() not in ("e4m3", "float8_e4m3fn"):
        return f"its weights have the format {stated['fmt']}, not e4m3"
    if str(stated.get("expert_dtype") or "fp8").lower() != "fp8":
        return f"its experts are stored as {stated['expert_dtype']}, not as fp8"
    excluded = stated_names(stated, "ignored_layers", "modules_to_not_convert")
    inputs = str(stated.get("activation_scheme")).lower() in ("dynamic", "static")
    return _with_block(Fp8Form(excluded=excluded, inputs=inputs), stated.get("weight_block_size"))


def _read_fbgemm(stated: Mapping[str, Any]) -> Fp8Form | str:
    return Fp8Form(excluded=stated_names(stated, "modules_to_not_convert"), inputs=True)  # the method has no other


def _read_modelopt(stated: Mapping[str, Any]) -> Fp8Form | str:
    stated = {**stated, **(stated.get("quantization") or {})}  # some have the fields of ModelOpt's file as they are
    if (refused := unsupported_kv_scheme(stated)) is not None:
        return refused
    algorithm = str(stated.get("quant_algo") or "").upper()
    if algorithm not in _MODELOPT_BLOCKS:
        return f"its quant_algo is {stated.get('quant_algo')}, not one of {', '.join(_MODELOPT_BLOCKS)}"
    excluded = stated_names(stated, "ignore", "exclude_modules")
    return Fp8Form(_MODELOPT_BLOCKS[algorithm], excluded, head=True, inputs=algorithm != _WEIGHTS_ONLY)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Fp8Form | str]] = MappingProxyType(
    {FP8: _read_fp8, FBGEMM: _read_fbgemm, MODELOPT: _read_modelopt}
)


def _is_float(stated: Mapping[str, Any]) -> bool:
    """Whether a configuration of compressed-tensors states FP8 weights, whatever else it does."""
    groups = stated.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    forms = {str(group.get("format") or stated.get("format")) for group in groups}
    weights = [group.get("weights") for group in groups]
    kinds = {str(each.get("type")) if isinstance(each, Mapping) else "" for each in weights}
    return forms == {FORMATS[0]} or (forms == {FORMATS[1]} and kinds == {"float"})


def _read_compressed(stated: Mapping[str, Any]) -> Fp8Form | str:
    if stated.get("transform_config"):
        return "it has a transform_config"
    if (refused := unsupported_kv_scheme(stated)) is not None:
        return refused
    sparsity = stated.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        return f"its sparsity_config is {sparsity!r}, not an object"
    if sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse, in the format {sparsity['format']}"
    groups = {name: compressed_group(name, group) for name, group in stated["config_groups"].items()}
    schemes = set(with_same_inputs(groups).values())
    if len(schemes) > 1:  # `srv.quantization.formats.compressed_tensors` serves them
        return "its groups of layers are quantized differently"
    (scheme,) = schemes
    return scheme if isinstance(scheme, str) else scheme._replace(excluded=stated_names(stated, "ignore"))


def with_same_inputs(groups: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Groups of layers that state quantized inputs only if all those in FP8 do: products are chosen for all layers."""
    inputs = all(each.inputs for each in groups.values() if isinstance(each, Fp8Form))
    return {name: each._replace(inputs=inputs) if isinstance(each, Fp8Form) else each for name, each in groups.items()}


def compressed_group(name: str, group: Mapping[str, Any]) -> Fp8Form | str:
    """The scheme of one group of layers; a clause if the layers do not support its form."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return f"its {name} has no weights"
    if group.get("output_activations"):
        return f"its {name} quantizes the outputs of layers as well (output_activations)"
    if (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        return f"its {name} has weights of {weights.get('num_bits')} bits of type {weights.get('type')}, not FP8"
    if not weights.get("symmetric", True):
        return f"its {name} has weights with zero points"
    inputs = group.get("input_activations") or {}
    if not isinstance(inputs, Mapping):
        return f"its {name} has the input_activations {inputs!r}, which are not an object"
    if inputs and inputs.get("type") != "float":
        return f"its {name} quantizes activations to type {inputs.get('type')}, not float"
    scheme = Fp8Form(head=True, inputs=inputs.get("num_bits") == 8)
    match weights.get("strategy") or "tensor":
        case "tensor" | "channel":
            return scheme
        case "block":
            return _with_block(scheme, weights.get("block_structure") or [128, 128])
        case other:
            return f"its {name} has scales per {other}, not per tensor, channel or block"


def _with_block(scheme: Fp8Form, stated: Any) -> Fp8Form | str:
    """The scheme with blocks of these sizes, as [128, 128] or "128x128"; None for none."""
    if stated is None:
        return scheme
    sizes = stated.lower().split("x") if isinstance(stated, str) else stated
    try:
        outputs, inputs = (int(size) for size in sizes)
    except (TypeError, ValueError, OverflowError):
        return f"its blocks are {stated!r}, not a number of outputs and one of inputs"
    if outputs < 1 or inputs < 1 or inputs % _INPUTS:
        return f"its blocks are {outputs} x {inputs}, and their inputs are not a multiple of {_INPUTS}"
    return scheme._replace(block=(outputs, inputs))


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: a float32 scale per block or weight, and one of inputs if activations are static."""
    rows, columns = config.get("weight_block_size") or (0, 0)
    of_inputs = 1 if config.get("activation_scheme") == "static" else 0

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        scales = math.prod(Fp8((rows, columns)).scale_shape(outputs, inputs)) if rows else 1
        return {"float8_e4m3fn": outputs * inputs, "float32": scales + of_inputs}

    return one_layout(layout, names_of(config, "modules_to_not_convert", "ignored_layers"))
