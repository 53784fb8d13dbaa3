"""Checkpoints of ModelOpt in FP8 and NVFP4: how they state it, and what is stored in NVFP4. Torch-free.

It is stated by a quantization_config with the quant_method modelopt, or by hf_quant_config.json. What FP8 weights are
is in `srv.quantization.formats.fp8_weights`; blocks are 128 x 128 for FP8_PB_WO. Must not know layers.

    NVFP4    weight          uint8 [N, K / 2]: two E2M1 codes per byte, that of the lower column in the low four bits
             weight_scale    float8_e4m3fn [N, K / 16], one per group of 16 inputs
             weight_scale_2  float32, one per matrix; a weight is value(code) * weight_scale * weight_scale_2
             input_scale     float32, of activations in NVFP4; not read, since activations keep the model's dtype

Layers hold NVFP4 as it is stored, in 4.5 bits per weight. No block type holds it exactly: those with groups of 16 have
integers as scales. `Fp8` with blocks of 1 x 16 would hold it in 10 bits, but the contract of `linear_fp8` has blocks of
a multiple of 32 inputs.

(Format: the source code of ModelOpt)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.quantization.formats.fp8_weights import DTYPE, REMEDY, Fp8Form, declares, method
from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import stated_names
from srv.quantization.formats.stored_counts import ceil, names_of, one_layout
from srv.quantization.formats.tool_files import modelopt_file
from srv.quantization.method import DOWNLOAD_REMEDY, QuantMethod, StoredCounts, StoredModel, UnknownStorage
from srv.quantization.schemes import SCALE, Fp8, HeldTensor, LayerSchemes, Matrix, Scheme, Units

if TYPE_CHECKING:
    from srv.specs import ModelFacts

NAME = "modelopt"
GROUP = 16  # inputs that share a scale in NVFP4
MATRIX_SCALE, INPUT_SCALE = "weight_scale_2", "input_scale"
PACKED_DTYPE = "uint8"
_NVFP4 = "NVFP4"
_SCALE_DTYPE = "float8_e4m3fn"
_WEIGHTS_ONLY = "FP8_PB_WO"
_PER_MATRIX = "FP8"  # with one scale of the weight, and one of its inputs
_BLOCKS: Mapping[str, tuple[int, int] | None] = {
    _PER_MATRIX: None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    _WEIGHTS_ONLY: (128, 128),
}
_EXCLUDED = ("ignore", "exclude_modules")
_NOTE = (
    "its NVFP4 weights are dequantized for every product, which takes longer than one with unquantized weights, and "
    "activations keep the model's dtype, whatever the checkpoint states of these"
)


@dataclass(frozen=True)
class NvFp4(Scheme):
    """NVFP4 as it is stored, but with the scale of a matrix for each of its outputs: fused layers have their own."""

    op = ""  # no platform has one

    @property
    def units(self) -> Units:
        return Units(inputs=GROUP)

    def tensors(self, matrix: Matrix) -> tuple[HeldTensor, ...]:
        outputs = sum(matrix.outputs)
        return (
            HeldTensor("weight", (outputs, matrix.inputs // 2), PACKED_DTYPE),
            HeldTensor(SCALE, (outputs, matrix.inputs // GROUP), "uint8"),
            HeldTensor(MATRIX_SCALE, (outputs,), "float32"),
        )


class NvFp4Form(NamedTuple):
    """excluded: patterns of layers that are not quantized, as the configuration states them."""

    excluded: tuple[str, ...]


def read(folder: Path, config: Mapping[str, Any]) -> Fp8Form | NvFp4Form | str | None:
    """The form of a checkpoint; a clause if layers do not support it; None if it is of another method.

    Raises ModelError (damaged) if ModelOpt's file cannot be read.
    """
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping):
        quant_config = modelopt_file(folder)
    if str(quant_config.get("quant_method", "")).lower() != NAME:
        return None
    try:
        return _read(_fields(quant_config))
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        return f"its quantization_config has an invalid value ({type(error).__name__}: {error})"


def read_fp8(folder: Path, config: Mapping[str, Any]) -> Fp8Form | str | None:
    """As `read`, for what reads FP8 only."""
    form = read(folder, config)
    return f"its quant_algo is {_NVFP4}" if isinstance(form, NvFp4Form) else form


def _fields(quant_config: Mapping[str, Any]) -> dict[str, Any]:
    nested = quant_config.get("quantization") or {}  # some have the fields of ModelOpt's file as they are
    return {**quant_config, **nested}


def _algorithm(quant_config: Mapping[str, Any]) -> str:
    return str(quant_config.get("quant_algo") or "").upper()


def _read(quant_config: Mapping[str, Any]) -> Fp8Form | NvFp4Form | str:
    if (refused := unsupported_kv_scheme(quant_config)) is not None:
        return refused
    algorithm, excluded = _algorithm(quant_config), stated_names(quant_config, *_EXCLUDED)
    if algorithm == _NVFP4:
        size = quant_config.get("group_size") or GROUP
        return NvFp4Form(excluded) if size == GROUP else f"its group_size is {size}, not {GROUP}"
    if algorithm not in _BLOCKS:
        return f"its quant_algo is {quant_config.get('quant_algo')}, not one of {', '.join((*_BLOCKS, _NVFP4))}"
    return Fp8Form(_BLOCKS[algorithm], excluded, head=True, inputs=algorithm != _WEIGHTS_ONLY)


def is_nvfp4(model: StoredModel, layer: str) -> bool:
    """Whether a layer has a weight in NVFP4. Raises ModelError for tensors that do not fit each other."""
    weight, *scales = (f"{layer}.{suffix}" for suffix in ("weight", SCALE, MATRIX_SCALE))
    dtype, path = model.types.get(weight), model.facts.path

    def fail(code: str, reason: str) -> NoReturn:
        raise ModelError(code, path, reason, DOWNLOAD_REMEDY)

    if dtype in FLOATS or not any(name in model.types for name in (weight, *scales)):
        return False  # if it is missing, the loader says so
    if dtype is not None and dtype != PACKED_DTYPE:
        reason = f"{weight} is stored as {dtype}, not as {PACKED_DTYPE}, which {_NVFP4} is"
        raise ModelError("unsupported_quantization", path, reason, REMEDY)
    for name in (weight, *scales):
        if name not in model.types:
            fail("missing_tensors", f"it lacks {name}")
    for name, expected in zip(scales, (_SCALE_DTYPE, "float32"), strict=True):
        if model.types[name] != expected:
            fail("dtype_mismatch", f"{name} is stored as {model.types[name]}, not as {expected}")
    shape, (groups, whole) = model.shapes[weight], (model.shapes[name] for name in scales)
    if len(shape) != 2 or shape[1] * 2 % GROUP:
        fail("shape_mismatch", f"{weight} has the shape {list(shape)}, not [outputs, bytes of groups of {GROUP}]")
    if groups != (fitting := (shape[0], shape[1] * 2 // GROUP)):
        reason = f"{scales[0]} has the shape {list(groups)}, but its weights {list(shape)} need {list(fitting)}"
        fail("shape_mismatch", reason)
    if math.prod(whole) != 1:
        fail("shape_mismatch", f"{scales[1]} has the shape {list(whole)}, and is not one value")
    return True


def nvfp4_schemes(model: StoredModel) -> LayerSchemes:
    """Raises ModelError as `is_nvfp4`, and for layers of which only some are quantized."""
    nvfp4, path = NvFp4(), model.facts.path
    form = read(Path(path), model.facts.config)
    float_form = Fp8Form(excluded=form.excluded, head=True) if isinstance(form, NvFp4Form) else Fp8Form()

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> NvFp4 | None:
        is_quantized = {name: is_nvfp4(model, name) if model.types else declares(float_form, name) for name in names}
        if not any(is_quantized.values()):
            return None
        if embedding:
            reason = f"{names[0]} is in {_NVFP4}, and no embedding layer supports that"
        elif not all(is_quantized.values()):
            quantized, plain = (
                next(name for name, value in is_quantized.items() if value is kind) for kind in (True, False)
            )
            reason = f"of layers that share one input, {quantized} is in {_NVFP4} and {plain} is not"
        elif inputs % GROUP:
            reason = f"the {inputs} inputs of {names[0]} are not groups of {GROUP}"
        else:
            return nvfp4
        raise ModelError("unsupported_quantization", path, reason, REMEDY)

    return scheme


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`, with the scales of inputs that ModelOpt writes."""
    quant_config = _fields(config)
    form, algorithm = _read(quant_config), _algorithm(quant_config)
    if isinstance(form, str):
        raise UnknownStorage(form)

    def nvfp4(outputs: int, inputs: int) -> dict[str, int]:
        return {PACKED_DTYPE: outputs * inputs // 2, _SCALE_DTYPE: outputs * ceil(inputs, GROUP), "float32": 2}

    def fp8(outputs: int, inputs: int) -> dict[str, int]:
        if algorithm == _PER_MATRIX:
            return {DTYPE: outputs * inputs, "float32": 2}
        return {DTYPE: outputs * inputs, "float32": math.prod(Fp8(_BLOCKS[algorithm]).scale_shape(outputs, inputs))}

    layout = nvfp4 if isinstance(form, NvFp4Form) else fp8
    return one_layout(layout, names_of(quant_config, *_EXCLUDED), head=True)


def _experts(bias: bool) -> tuple[str, str] | None:
    return (f"experts with biases cannot be in {_NVFP4}", REMEDY) if bias else None


def _detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    form = read(folder, config)
    return form if isinstance(form, str) else form is not None


def _of_form(model: ModelFacts) -> QuantMethod:
    form = read(Path(model.path), model.config)
    if isinstance(form, NvFp4Form):
        return _NVFP4_METHOD
    assert _FP8_METHOD.of_form is not None
    return _FP8_METHOD.of_form(model)


_STORAGE = "srv.quantization.formats.modelopt_storage"
_FP8_METHOD = method(NAME, read_fp8, f"{_STORAGE}:ModelOptStorageFormat")
_NVFP4_METHOD = QuantMethod(
    name=NAME,
    layers=f"{_STORAGE}:NvFp4Layers",
    storage=f"{_STORAGE}:NvFp4StorageFormat",
    detect=_detect,
    sharding=None,
    schemes=nvfp4_schemes,
    experts=_experts,
    row_tensors=("weight", SCALE, MATRIX_SCALE),
    packed=True,
    dequantizable=True,
    note=_NOTE,
)
METHOD = _FP8_METHOD._replace(detect=_detect, of_form=_of_form, stored=stored, packed=True)
