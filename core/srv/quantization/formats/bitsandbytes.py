"""Checkpoints of bitsandbytes: NF4, FP4 and int8 weights, how they are recognised, and their sizes. Torch-free.

Owns the configuration, and which layers are quantized. Codes of 4 bits are repacked at load into blocks of 64 with a
float32 and a table (`srv.models.checkpoints.gguf_types.OTHER_BLOCKS`), so that platforms multiply by them as by the
blocks of GGUF files; int8 weights are those of `linear_int8` (docs/adr/0072-blocks-with-tables.md). Must not know
layers.

    4 bits   weight uint8 [N K / 2, 1], weight.absmax, weight.quant_map [16], weight.quant_state.bitsandbytes__nf4
             nested scales also: weight.nested_absmax, weight.nested_quant_map [256]; absmax is uint8 then
    int8     weight int8 [N, K], SCB float32 [N], weight_format

(Format: the source code of bitsandbytes and transformers)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from srv.dtypes import FLOATS, STORED_SIZES
from srv.errors import ModelError
from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.quantization.formats.int8_weights import check_experts, experts_note
from srv.quantization.formats.layer_patterns import names_layer, stated_names
from srv.quantization.formats.stored_counts import ceil, linear_layers, names_of, one_layout
from srv.quantization.method import (
    DOWNLOAD_REMEDY,
    QuantMethod,
    StoredCounts,
    StoredModel,
    UnknownStorage,
    shape_of_bytes,
)
from srv.quantization.schemes import Blocks, Int8, LayerSchemes, Scheme

if TYPE_CHECKING:
    from srv.specs import ModelFacts

NAME = "bitsandbytes"
TYPES: Mapping[str, str] = {"nf4": "NF4", "fp4": "FP4"}  # the type of blocks that layers hold
STATE = "quant_state.bitsandbytes__"
INT8_SCALE, INT8_FORMAT = "SCB", "weight_format"
BLOCK = TYPES_BY_NAME["NF4"].elements
PLAIN, NESTED = ("absmax", "quant_map"), ("nested_absmax", "nested_quant_map")  # suffixes of a weight of 4 bits
REMEDY = "Use another checkpoint of the model, or a GGUF file"
_SKIPPED = "llm_int8_skip_modules"
_TABLE, _NESTED_BLOCK = 16, 256  # values of codes of 4 bits; scales that share one, and the values of their codes
_STORAGES = ("uint8", "int8", "bfloat16", "float16", "float32")


def quant_type(quant_config: Mapping[str, Any]) -> str:
    """ "nf4", "fp4" or "int8". Configurations of 8 bits state the fields of 4 bits as well."""
    if quant_config.get("load_in_8bit"):
        return "int8"
    return str(quant_config.get("bnb_4bit_quant_type") or "fp4").lower() if quant_config.get("load_in_4bit") else ""


def stated_type(config: Mapping[str, Any]) -> str:
    quant_config = config.get("quantization_config")
    return quant_type(quant_config) if isinstance(quant_config, Mapping) else ""


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping) or str(quant_config.get("quant_method", NAME)).lower() != NAME:
        return False
    kind = quant_type(quant_config)
    if not kind:
        return "it states neither load_in_4bit nor load_in_8bit" if "quant_method" in quant_config else False
    if kind not in (*TYPES, "int8"):
        return f"its weights of 4 bits are of type {kind}, not {' or '.join(TYPES)}"
    storage = str(quant_config.get("bnb_4bit_quant_storage") or "uint8")
    if kind != "int8" and storage not in _STORAGES:
        return f"its weights of 4 bits are stored as {storage}"
    try:
        stated_names(quant_config, _SKIPPED)
    except ValueError as error:
        return f"its {error}"
    return True


def _skipped(quant_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers that are not quantized: the output layer, unless they are stated."""
    return ("lm_head",) if quant_config.get(_SKIPPED) is None else stated_names(quant_config, _SKIPPED)


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`. A JSON object of less than 200 bytes, which each weight of 4 bits has, is not counted.

    Nested: the scales of blocks are integers of 8 bits, and a float scales 256 of them. 8 bits: the format is a number.
    """
    kind, nested = quant_type(config), bool(config.get("bnb_4bit_use_double_quant"))
    if kind not in (*TYPES, "int8"):
        raise UnknownStorage(f"weights of type {kind or None} are not known")
    skipped = names_of({_SKIPPED: _skipped(config)}, _SKIPPED)

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        if kind == "int8":
            return {"int8": outputs * inputs, "float32": outputs, "uint8": 1}
        codes = ceil(outputs * inputs, 2)
        blocks = ceil(outputs * inputs, BLOCK)
        if not nested:
            return {"uint8": codes, "float32": blocks + _TABLE}
        return {"uint8": codes + blocks, "float32": _TABLE + ceil(blocks, _NESTED_BLOCK) + _NESTED_BLOCK}

    return linear_layers(one_layout(layout, skipped, head=True))


def layer_type(model: StoredModel, name: str) -> str:
    """The type of blocks of a layer, "int8", or "" if it is not quantized.

    Its tensors say so; without weights, the configuration does.
    """
    if model.types:
        if f"{name}.{INT8_SCALE}" in model.types:
            return "int8"
        return next((kind for code, kind in TYPES.items() if f"{name}.weight.{STATE}{code}" in model.types), "")
    quant_config = model.facts.config.get("quantization_config") or {}
    if any(names_layer(pattern, name) for pattern in _skipped(quant_config)) or ".experts." in name:
        return ""
    kind = quant_type(quant_config)
    return TYPES.get(kind, kind)


def shared_type(model: StoredModel, names: Sequence[str], inputs: int) -> str:
    """`layer_type` of layers that share one input.

    Raises ModelError: unsupported_quantization if they differ, or for inputs that are not whole blocks;
    missing_tensors, dtype_mismatch and shape_mismatch for damaged ones.
    """
    for name in names if model.types else ():
        _check_four_bits(model, f"{name}.weight")
        _check_int8(model, name)
    types = {name: layer_type(model, name) for name in names}
    first = types[names[0]]
    reason = None
    if len(set(types.values())) > 1:
        other = next(name for name, kind in types.items() if kind != first)
        stored = [types[stored_type] or "not quantized" for stored_type in (names[0], other)]
        reason = f"of layers that share one input, {names[0]} is {stored[0]} and {other} is {stored[1]}"
    elif first not in ("", "int8", *TYPES.values()):
        reason = f"its weights of 4 bits are of type {first}, not {' or '.join(TYPES)}"
    elif first in TYPES.values() and inputs % BLOCK:
        reason = f"the {inputs} inputs of {names[0]} are not whole blocks of {BLOCK}"
    elif first == "int8" and ".experts." in names[0]:
        check_experts(model, names)
    if reason is not None:
        raise ModelError("unsupported_quantization", model.facts.path, reason, REMEDY)
    return first


def _fail(model: StoredModel, code: str, reason: str) -> NoReturn:
    raise ModelError(code, model.facts.path, reason, DOWNLOAD_REMEDY)


def _check_four_bits(model: StoredModel, weight: str) -> None:
    """Check what headers show of a weight of 4 bits, if any tensor belongs to it. Its sizes are in a tensor."""
    stored = [suffix for suffix in (*PLAIN, *NESTED) if f"{weight}.{suffix}" in model.types]
    states = [code_type for code_type in TYPES if f"{weight}.{STATE}{code_type}" in model.types]
    if not stored and not states:
        return
    if not states:
        _fail(model, "missing_tensors", f"it lacks {weight}.{STATE}nf4 (or fp4)")
    nested = any(suffix in stored for suffix in NESTED)
    required = (weight, *(f"{weight}.{suffix}" for suffix in (*PLAIN, *(NESTED if nested else ()))))
    if missing := [tensor for tensor in required if tensor not in model.types]:
        _fail(model, "missing_tensors", f"it lacks {missing[0]}")
    dtype = model.types[f"{weight}.absmax"]
    if dtype not in (("uint8",) if nested else FLOATS):
        expected = "uint8" if nested else "floats"
        _fail(model, "dtype_mismatch", f"{weight}.absmax is stored as {dtype}, not as {expected}")


def _check_int8(model: StoredModel, layer: str) -> None:
    """Check the headers of an int8 weight and its scales, if there is either."""
    weight, scale = f"{layer}.weight", f"{layer}.{INT8_SCALE}"
    if scale not in model.types:
        if f"{layer}.{INT8_FORMAT}" in model.types:
            _fail(model, "missing_tensors", f"it lacks {scale}")
        return
    if weight not in model.types:
        _fail(model, "missing_tensors", f"it lacks {weight}")
    if (dtype := model.types[weight]) != "int8":
        _fail(model, "dtype_mismatch", f"{weight} is stored as {dtype}, not as int8")
    if (dtype := model.types[scale]) not in FLOATS:
        _fail(model, "dtype_mismatch", f"{scale} is stored as {dtype}, not as floats")
    shape, scale_shape = model.shapes[weight], model.shapes[scale]
    if scale_shape != shape[:1]:
        reason = f"{scale} has the shape {list(scale_shape)}, but its weights {list(shape)} need {list(shape[:1])}"
        _fail(model, "shape_mismatch", reason)


def schemes(model: StoredModel) -> LayerSchemes:
    """Raises ModelError as `shared_type`."""

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Scheme | None:
        kind = "" if embedding else shared_type(model, names, inputs)
        if not kind:
            return None
        return Int8("none") if kind == "int8" else Blocks((kind,))

    return scheme


def _matrix_shape(model: StoredModel, layer: str) -> tuple[int, int] | None:
    """Of 4 bits: a row for each block, because the shape of a matrix is in the values of a tensor."""
    name = f"{layer}.weight"
    if layer_type(model, layer) not in TYPES.values():
        return shape_of_bytes(model, layer)
    return prod(model.shapes.get(name, ())) * STORED_SIZES[model.types[name]] * 2 // BLOCK, BLOCK


def _of_form(model: ModelFacts) -> QuantMethod:
    """With the one op of the stated type: a platform without kernels for blocks may have one for int8."""
    kind = stated_type(model.config)
    if kind != "int8":
        return METHOD._replace(ops=("linear_gguf",)) if kind else METHOD
    return METHOD._replace(ops=("linear_int8",), note=experts_note(model))


METHOD = QuantMethod(
    name=NAME,
    storage="srv.quantization.formats.bitsandbytes_storage:BitsAndBytesStorageFormat",
    ops=("linear_gguf", "linear_int8"),
    detect=detect,
    sharding=None,
    schemes=schemes,
    row_tensors=("weight", "weight_scale"),
    packed=True,
    matrix_shape=_matrix_shape,
    of_form=_of_form,
    dequantizable=True,
    stored=stored,
)
