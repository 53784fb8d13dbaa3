"""Checkpoints of ModelOpt in FP8: how their configurations state it. Torch-free.

It is stated by a quantization_config with the quant_method modelopt, or by hf_quant_config.json. Blocks are 128 x 128
for FP8_PB_WO. Must not know what is stored: `srv.quantization.formats.fp8_weights` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srv.quantization.formats.fp8_weights import Fp8Form, method
from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import stated_names
from srv.quantization.formats.tool_files import modelopt_file

NAME = "modelopt"
_WEIGHTS_ONLY = "FP8_PB_WO"
_BLOCKS: Mapping[str, tuple[int, int] | None] = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    _WEIGHTS_ONLY: (128, 128),
}


def read(folder: Path, config: Mapping[str, Any]) -> Fp8Form | str | None:
    """The form of a checkpoint; a clause if layers do not support it; None if it is of another method.

    Raises ModelError (damaged) if ModelOpt's file cannot be read.
    """
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        stated = modelopt_file(folder)
    if str(stated.get("quant_method", "")).lower() != NAME:
        return None
    try:
        return _read(stated)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        return f"its quantization_config has an invalid value ({type(error).__name__}: {error})"


def _read(stated: Mapping[str, Any]) -> Fp8Form | str:
    stated = {**stated, **(stated.get("quantization") or {})}  # some have the fields of ModelOpt's file as they are
    if (refused := unsupported_kv_scheme(stated)) is not None:
        return refused
    algorithm = str(stated.get("quant_algo") or "").upper()
    if algorithm not in _BLOCKS:
        return f"its quant_algo is {stated.get('quant_algo')}, not one of {', '.join(_BLOCKS)}"
    excluded = stated_names(stated, "ignore", "exclude_modules")
    return Fp8Form(_BLOCKS[algorithm], excluded, head=True, inputs=algorithm != _WEIGHTS_ONLY)


METHOD = method(NAME, read, "srv.quantization.formats.modelopt_storage:ModelOptStorageFormat")
