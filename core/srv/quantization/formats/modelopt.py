"""Checkpoints of ModelOpt in FP8 and NVFP4: how they state it. Torch-free.

It is stated by a quantization_config with the quant_method modelopt, or by hf_quant_config.json. What FP8 weights are
is in `srv.quantization.formats.fp8_weights`, with blocks of 128 x 128 for FP8_PB_WO, and what NVFP4 is, in
`srv.quantization.formats.nvfp4`. Must not know layers.

(Format: the source code of ModelOpt)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srv.quantization.formats.fp8_weights import DTYPE, Fp8Form, method
from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import stated_names
from srv.quantization.formats.nvfp4 import (
    GROUP,
    NVFP4,
    PACKED_DTYPE,
    SCALE_DTYPE,
    NvFp4Checkpoint,
    NvFp4Form,
    NvFp4Names,
    nvfp4_method,
)
from srv.quantization.formats.stored_counts import ceil, names_of, one_layout
from srv.quantization.formats.tool_files import modelopt_file
from srv.quantization.method import QuantMethod, StoredCounts, StoredModel, UnknownStorage
from srv.quantization.schemes import Fp8

if TYPE_CHECKING:
    from srv.specs import ModelFacts

NAME = "modelopt"
NAMES = NvFp4Names("weight", "weight_scale_2", "input_scale")
_WEIGHTS_ONLY = "FP8_PB_WO"
_PER_MATRIX = "FP8"  # with one scale of the weight, and one of its inputs
_BLOCKS: Mapping[str, tuple[int, int] | None] = {
    _PER_MATRIX: None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    _WEIGHTS_ONLY: (128, 128),
}
_EXCLUDED = ("ignore", "exclude_modules")


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
    return f"its quant_algo is {NVFP4}" if isinstance(form, NvFp4Form) else form


def _fields(quant_config: Mapping[str, Any]) -> dict[str, Any]:
    nested = quant_config.get("quantization") or {}  # some have the fields of ModelOpt's file as they are
    return {**quant_config, **nested}


def _algorithm(quant_config: Mapping[str, Any]) -> str:
    return str(quant_config.get("quant_algo") or "").upper()


def _read(quant_config: Mapping[str, Any]) -> Fp8Form | NvFp4Form | str:
    if (refused := unsupported_kv_scheme(quant_config)) is not None:
        return refused
    algorithm, excluded = _algorithm(quant_config), stated_names(quant_config, *_EXCLUDED)
    if algorithm == NVFP4:
        size = quant_config.get("group_size") or GROUP
        return NvFp4Form(excluded) if size == GROUP else f"its group_size is {size}, not {GROUP}"
    if algorithm not in _BLOCKS:
        return f"its quant_algo is {quant_config.get('quant_algo')}, not one of {', '.join((*_BLOCKS, NVFP4))}"
    return Fp8Form(_BLOCKS[algorithm], excluded, head=True, inputs=algorithm != _WEIGHTS_ONLY)


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`, with the scales of inputs that ModelOpt writes."""
    quant_config = _fields(config)
    form, algorithm = _read(quant_config), _algorithm(quant_config)
    if isinstance(form, str):
        raise UnknownStorage(form)

    def nvfp4(outputs: int, inputs: int) -> dict[str, int]:
        return {PACKED_DTYPE: outputs * inputs // 2, SCALE_DTYPE: outputs * ceil(inputs, GROUP), "float32": 2}

    def fp8(outputs: int, inputs: int) -> dict[str, int]:
        if algorithm == _PER_MATRIX:
            return {DTYPE: outputs * inputs, "float32": 2}
        return {DTYPE: outputs * inputs, "float32": math.prod(Fp8(_BLOCKS[algorithm]).scale_shape(outputs, inputs))}

    layout = nvfp4 if isinstance(form, NvFp4Form) else fp8
    return one_layout(layout, names_of(quant_config, *_EXCLUDED), head=True)


def _detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    form = read(folder, config)
    return form if isinstance(form, str) else form is not None


def _of_form(model: ModelFacts) -> QuantMethod:
    form = read(Path(model.path), model.config)
    if isinstance(form, NvFp4Form):
        return _NVFP4_METHOD
    assert _FP8_METHOD.of_form is not None
    return _FP8_METHOD.of_form(model)


def nvfp4_checkpoint(model: StoredModel) -> NvFp4Checkpoint:
    form = read(Path(model.facts.path), model.facts.config)
    return NvFp4Checkpoint(model, NAMES, form.excluded if isinstance(form, NvFp4Form) else ())


_STORAGE = "srv.quantization.formats.modelopt_storage"
_FP8_METHOD = method(NAME, read_fp8, f"{_STORAGE}:ModelOptStorageFormat")
_NVFP4_METHOD = nvfp4_method(NAME, nvfp4_checkpoint, _STORAGE)
METHOD = _FP8_METHOD._replace(detect=_detect, of_form=_of_form, stored=stored, packed=True)
