"""What a checkpoint's configuration says of the scales of its keys and values. Torch-free.

compressed-tensors and ModelOpt state it beside the scheme of the weights. Weights do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srv.quantization.formats.tool_files import modelopt_file

# The fields of `kv_cache_scheme` that are read, with their values for 8-bit floats with one scale per layer.
_FIELDS = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True, None),
    "strategy": ("tensor", None),
    "dynamic": (False, None),
}


def stated_kv_field(quant_config: Mapping[str, Any]) -> str:
    """The field by which a `quantization_config` says that keys and values are 8-bit floats; "" if none does."""
    scheme = quant_config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
        return "kv_cache_scheme"
    return "kv_cache_quant_algo" if quant_config.get("kv_cache_quant_algo") == "FP8" else ""


def kv_field(folder: Path, config: Mapping[str, Any]) -> str:
    """The field by which a checkpoint says that keys and values are 8-bit floats; "" if none does.

    Raises ModelError (damaged) if a file beside config.json cannot be read.
    """
    quant_config = config.get("quantization_config")
    quant_config = quant_config if isinstance(quant_config, Mapping) else modelopt_file(folder)
    nested = quant_config.get("quantization")
    return stated_kv_field(quant_config) or (stated_kv_field(nested) if isinstance(nested, Mapping) else "")


def unsupported_kv_scheme(config: Mapping[str, Any]) -> str | None:
    """Why the scales of keys and values that a `quantization_config` describes are not read; None if they are.

    They are if there are none, or one of 8-bit floats per layer, fixed in the checkpoint.
    """
    algorithm = config.get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        return f"it has a kv_cache_quant_algo {algorithm}, which is not FP8"
    scheme = config.get("kv_cache_scheme")
    if not scheme:
        return None
    if not isinstance(scheme, Mapping):
        return f"it has a kv_cache_scheme {scheme!r}, which is not an object"
    for name, values in _FIELDS.items():
        if scheme.get(name) not in values:
            return f"it has a kv_cache_scheme with {name} {scheme.get(name)}, not {values[0]}"
    return None
