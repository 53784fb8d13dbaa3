"""Files beside config.json that state how weights are quantized, as some tools write them. Torch-free.

    quantize_config.json    AutoGPTQ and GPTQModel, with the fields of their quantization_config
    quant_config.json       AutoAWQ, with the old names of its fields
    hf_quant_config.json    ModelOpt, with the fields of its quantization_config in an object

Must not know what the fields mean.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from srv.errors import ModelError

# The method of each, if it names none.
_FILES: Mapping[str, str] = MappingProxyType({"quantize_config.json": "gptq", "quant_config.json": "awq"})
_PACKED = ".qweight"
MODELOPT, _MODELOPT_FILE = "modelopt", "hf_quant_config.json"


def with_tool_file(folder: Path, config: dict[str, Any], stored: Collection[str] | None) -> dict[str, Any]:
    """A configuration with the contents of such a file as its quantization_config, if it has none of its own.

    `stored`: the names of the weights, of which some must be packed; None if there are none. Raises ModelError
    (damaged) for a file that is no JSON object.
    """
    nested = config.get("text_config")
    parts = (config, nested if isinstance(nested, Mapping) else {})
    if any(part.get("quantization_config") is not None for part in parts):
        return config
    if stored is not None and not any(name.endswith(_PACKED) for name in stored):
        return config
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        return config
    try:
        fields = {"quant_method": _FILES[path.name], **json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = f"it does not describe a quantization ({type(error).__name__}: {error})"
        raise ModelError("damaged", str(path), reason, "Download the file again") from error
    return {**config, "quantization_config": fields}


def modelopt_file(folder: Path) -> Mapping[str, Any]:
    """The contents of ModelOpt's own file as a quantization_config; {} if there is none."""
    path = folder / _MODELOPT_FILE
    if not path.is_file():
        return {}
    try:
        quant_config = json.loads(path.read_text(encoding="utf-8"))["quantization"]
        return {**quant_config, "quant_method": MODELOPT, "ignore": quant_config.get("exclude_modules")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it does not describe a quantization ({type(error).__name__}: {error})"
        raise ModelError("damaged", str(path), reason, "Download the file again") from error
