"""Checkpoints in FP8 of vLLM and transformers, of FBGEMM, and of compressed-tensors with nothing else. Torch-free.

Owns their configurations. Must not know what is stored: `srv.quantization.formats.fp8_weights` does.

    method        stated by                                           block
    fp8           quant_method fp8                                    weight_block_size
    fp8           compressed-tensors, of the format float-quantized   block_structure
    fbgemm_fp8    quant_method fbgemm_fp8                             none

Activations are unquantized, static or dynamic there. A platform may quantize those of the last two, dynamically.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srv.dtypes import FLOATS
from srv.quantization.formats import compressed_tensors
from srv.quantization.formats.fp8_weights import DTYPE, Fp8Form, method, with_block
from srv.quantization.formats.layer_patterns import stated_names
from srv.quantization.formats.online import FP8WO
from srv.quantization.formats.stored_counts import names_of, one_layout
from srv.quantization.method import StoredCounts
from srv.quantization.schemes import Fp8

if TYPE_CHECKING:
    from srv.specs import ModelFacts

FP8, FBGEMM = "fp8", "fbgemm_fp8"


def read(folder: Path, config: Mapping[str, Any]) -> Fp8Form | str | None:
    """The form of a checkpoint of `fp8`; a clause if layers do not support it; None if it is of another method."""
    form = _read(FP8, _read_fp8, config)
    return compressed_tensors.read_float(config) if form is None else form


def read_fbgemm(folder: Path, config: Mapping[str, Any]) -> Fp8Form | str | None:
    """As `read`, of `fbgemm_fp8`."""
    return _read(FBGEMM, _read_fbgemm, config)


def _read(
    name: str, read_form: Callable[[Mapping[str, Any]], Fp8Form | str], config: Mapping[str, Any]
) -> Fp8Form | str | None:
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping) or str(quant_config.get("quant_method", "")).lower() != name:
        return None
    try:
        return read_form(quant_config)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        return f"its quantization_config has an invalid value ({type(error).__name__}: {error})"


def _read_fp8(quant_config: Mapping[str, Any]) -> Fp8Form | str:
    if str(quant_config.get("fmt") or "e4m3").lower() not in ("e4m3", "float8_e4m3fn"):
        return f"its weights have the format {quant_config['fmt']}, not e4m3"
    if str(quant_config.get("expert_dtype") or "fp8").lower() != "fp8":
        return f"its experts are stored as {quant_config['expert_dtype']}, not as fp8"
    excluded = stated_names(quant_config, "ignored_layers", "modules_to_not_convert")
    inputs = str(quant_config.get("activation_scheme")).lower() in ("dynamic", "static")
    return with_block(Fp8Form(excluded=excluded, inputs=inputs), quant_config.get("weight_block_size"))


def _read_fbgemm(quant_config: Mapping[str, Any]) -> Fp8Form | str:
    excluded = stated_names(quant_config, "modules_to_not_convert")
    return Fp8Form(excluded=excluded, inputs=True)  # the method has no other


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: a float32 scale per block or weight, and one of inputs if activations are static."""
    rows, columns = config.get("weight_block_size") or (0, 0)
    of_inputs = 1 if config.get("activation_scheme") == "static" else 0

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        scales = math.prod(Fp8((rows, columns)).scale_shape(outputs, inputs)) if rows else 1
        return {"float8_e4m3fn": outputs * inputs, "float32": scales + of_inputs}

    return one_layout(layout, names_of(config, "modules_to_not_convert", "ignored_layers"))


def fbgemm_stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: a float32 scale per output."""
    return one_layout(
        lambda outputs, inputs: {"float8_e4m3fn": outputs * inputs, "float32": outputs},
        names_of(config, "modules_to_not_convert"),
    )


def accepts(model: ModelFacts) -> str | None:
    """Why the weights of a checkpoint that names no method are neither FP8, nor can be quantized at load."""
    others = sorted(model.stored_types.keys() - FLOATS - {DTYPE})
    return f"some of its weights are stored as {others[0]}" if others else None


def _at_load(model: ModelFacts) -> str | None:
    return None if DTYPE in model.stored_types else FP8WO.name


METHOD = method(
    FP8,
    read,
    "srv.quantization.formats.fp8_storage:StatedFp8StorageFormat",
    accepts=accepts,
    at_load=_at_load,
    stored=stored,
)
FBGEMM_METHOD = method(
    FBGEMM, read_fbgemm, "srv.quantization.formats.fp8_storage:FBGEMMStorageFormat", stored=fbgemm_stored
)
