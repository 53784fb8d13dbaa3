"""Checkpoints quantized with the tool modelslim: the quantization type of each tensor. Torch-free.

Owns the description file, `quant_model_description*.json` (or the same map within `quantization_config`), which gives
a type for every stored tensor. Must not know layers.

    type            stored tensors of a linear layer
    FLOAT           weight, bias in the checkpoint's own dtype
    W8A8            weight, input_scale, input_offset, quant_bias, deq_scale
    W8A8_DYNAMIC    weight, weight_scale, weight_offset

(Format: https://www.hiascend.com/document/detail/zh/mindie/230/mindiellm/llmdev/mindie_llm0288.html)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.quantization.formats.int8_weights import (
    UNQUANTIZED,
    Beside,
    QuantDescription,
    check_int8,
    check_unquantized,
    check_unquantized_up_projections,
)
from srv.quantization.method import QuantMethod, StoredModel
from srv.quantization.schemes import Int8, LayerSchemes

NAME = "modelslim"
FLOAT, STATIC, DYNAMIC = UNQUANTIZED, "W8A8", "W8A8_DYNAMIC"
QUANT_TYPES = (FLOAT, STATIC, DYNAMIC)
_HELD: Mapping[str, Int8] = {STATIC: Int8("static", bias_inside=True), DYNAMIC: Int8(offsets=True)}
_FILES = "quant_model_description*.json"
_MODEL_TYPE_KEY = "model_quant_type"  # the type of most layers; its presence marks a description within `config.json`
_SUFFIXES = (
    *("weight", "bias", "weight_scale", "weight_offset", "e_score_correction_bias"),
    *("input_scale", "input_offset", "quant_bias", "deq_scale"),
)
# Some versions of the tool also store these for W8A8 layers; the layer's other tensors already contain them.
_REDUNDANT_SUFFIXES = ("weight_scale", "weight_offset", "bias")
_WHOLE_NUMBERS = ("int8", "int16", "int32", "int64")
# The tensors beside the int8 weight of each type. `deq_scale` may be the bits of a float32.
_BESIDE: Mapping[str, Mapping[str, Beside]] = {
    DYNAMIC: {name: Beside(FLOATS, (("out", 1),)) for name in ("weight_scale", "weight_offset")},
    STATIC: {
        "input_scale": Beside(FLOATS, ((1,),)),
        "input_offset": Beside((*FLOATS, *_WHOLE_NUMBERS), ((1,),)),
        "quant_bias": Beside(("int32",), (("out",),)),
        "deq_scale": Beside((*FLOATS, "int64"), (("out",),)),
    },
}


def redundant(names: Iterable[str], description: QuantDescription) -> set[str]:
    """Stored tensors that no layer needs, because other tensors of a W8A8 layer already contain them."""
    return {
        name
        for name in names
        if name.rpartition(".")[2] in _REDUNDANT_SUFFIXES
        and description.of_weight(f"{name.rpartition('.')[0]}.weight") == STATIC
    }


def tensors_of(description: QuantDescription, layer: str) -> tuple[str, ...]:
    """The suffixes of the tensors of a quantized layer; () of any other one."""
    beside = _BESIDE.get(description.of_weight(f"{layer}.weight"))
    return () if beside is None else ("weight", *beside)


def detect(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether there is a description with a type other than FLOAT. Raises ModelError like `read_description`."""
    return bool(read_description(folder, config))


def read_description(folder: Path, config: Mapping[str, Any]) -> QuantDescription:
    """The description of the checkpoint in `folder`; if there is none, all of its weights are FLOAT.

    Raises ModelError: damaged, or unsupported_quantization for types and tensors that srv does not implement.
    """
    path, entries = _entries(folder, config)
    if entries is None:
        return QuantDescription(path, {})
    quantized = (name for name, value in entries.items() if "." in name and value != FLOAT)
    unsupported = sorted(name for name in quantized if not _is_supported(name))
    if unsupported:
        reason = f"it contains {unsupported[0]}, which srv does not load yet ({len(unsupported)} such tensors)"
        remedy = "Quantize without outlier suppression in the norms, and without KV cache quantization"
        raise ModelError("unsupported_quantization", path, reason, remedy)
    quant_types = {name: str(value) for name, value in entries.items() if name.endswith(".weight")}
    unknown = sorted(set(quant_types.values()) - set(QUANT_TYPES))
    if unknown:
        reason = f"it contains weights of type {', '.join(unknown)}, which srv does not load yet"
        raise ModelError("unsupported_quantization", path, reason, f"Use weights of the types {', '.join(QUANT_TYPES)}")
    return QuantDescription(path, quant_types)


def description_of(model: StoredModel) -> QuantDescription:
    """The description by the names that the model's layers have, which files of some architectures have not."""
    return read_description(Path(model.facts.path), model.facts.config).by_names(model.stored_names)


def _is_supported(name: str) -> bool:
    """Whether a layer of srv loads this tensor, which belongs to quantized weights.

    Biases of norms come from outlier suppression, and are not supported.
    """
    owner, _, suffix = name.rpartition(".")
    return suffix in _SUFFIXES and not (suffix == "bias" and owner.endswith("norm"))


def _entries(folder: Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """The path that errors name, and the map from tensor names to types if there is one."""
    files = sorted(folder.glob(_FILES))
    if len(files) > 1:
        reason = f"it has {len(files)} descriptions of its weights ({', '.join(file.name for file in files)})"
        raise ModelError("damaged", str(folder), reason, "Keep the one that belongs to the weights")
    if files:
        try:
            entries = json.loads(files[0].read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = f"it cannot be read as JSON ({error})"
            raise ModelError("damaged", str(files[0]), reason, "Download the file again") from error
        if not isinstance(entries, dict):
            reason = f"it is a JSON {type(entries).__name__}, not an object"
            raise ModelError("damaged", str(files[0]), reason, "Download the file again")
        return str(files[0]), entries
    nested = config.get("quantization_config")
    if isinstance(nested, Mapping) and _MODEL_TYPE_KEY in nested:
        return str(folder / "config.json"), nested
    return str(folder), None


def quant_type(model: StoredModel, description: QuantDescription, names: Sequence[str], inputs: int) -> str:
    """The type of layers that share one input: those that a linear layer fuses, or projections of experts.

    Raises ModelError: unsupported_quantization if they differ; others for damaged ones, like `check_int8`.
    """
    kind = description.quant_type(names)
    for name in names if model.types else ():
        if kind == FLOAT:
            check_unquantized(model, name)
        else:
            check_int8(model, name, inputs, _BESIDE[kind], _REDUNDANT_SUFFIXES if kind == STATIC else ())
    return kind


def schemes(model: StoredModel) -> LayerSchemes:
    """Raises ModelError as `quant_type`, and for experts with static activations."""
    description = description_of(model)
    check_unquantized_up_projections(model)

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Int8 | None:
        if embedding:
            check_unquantized(model, names[0])
            return None
        kind = quant_type(model, description, names, inputs)
        return _HELD.get(kind)

    return scheme


METHOD = QuantMethod(
    name=NAME,
    storage="srv.quantization.formats.modelslim_storage:ModelslimStorageFormat",
    ops=("linear_w8a8", "linear_w8a8_static"),
    detect=detect,
    sharding=None,
    schemes=schemes,
    row_tensors=("weight", "weight_scale", "weight_offset", "deq_scale", "quant_bias"),
    dequantizable=True,
)
