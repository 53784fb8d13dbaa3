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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from srv.errors import ModelError

NAME = "modelslim"
FLOAT, STATIC, DYNAMIC = "FLOAT", "W8A8", "W8A8_DYNAMIC"
QUANT_TYPES = (FLOAT, STATIC, DYNAMIC)
_FILES = "quant_model_description*.json"
_MODEL_TYPE_KEY = "model_quant_type"  # the type of most layers; its presence marks a description within `config.json`
_SUFFIXES = (
    *("weight", "bias", "weight_scale", "weight_offset"),
    *("input_scale", "input_offset", "quant_bias", "deq_scale"),
)
# Some versions of the tool also store these for W8A8 layers; the layer's other tensors already contain them.
_REDUNDANT_SUFFIXES = ("weight_scale", "weight_offset", "bias")


class QuantDescription:
    """The quantization types of a checkpoint's linear layers. `quant_types`: by the name of the weight tensor."""

    def __init__(self, path: str, quant_types: Mapping[str, str]) -> None:
        self._path, self._quant_types = path, quant_types

    def quant_type(self, names: Iterable[str]) -> str:
        """The type of layers that are fused into one; FLOAT for those not described.

        Raises ModelError (unsupported_quantization) if the layers differ.
        """
        found = {name: self._quant_types.get(f"{name}.weight", FLOAT) for name in names}
        if len(set(found.values())) > 1:
            differences = ", ".join(f"{name} is {quant_type}" for name, quant_type in found.items())
            raise ModelError(
                "unsupported_quantization",
                self._path,
                f"layers that share one input are quantized differently ({differences})",
                "Quantize them alike: in the list of layers that stay FLOAT, name all of them or none",
            )
        return next(iter(found.values()))

    def unused(self, names: Iterable[str]) -> set[str]:
        """Stored tensors that no layer needs, because other tensors of a W8A8 layer already contain them."""
        return {
            name
            for name in names
            if name.rpartition(".")[2] in _REDUNDANT_SUFFIXES
            and self._quant_types.get(f"{name.rpartition('.')[0]}.weight") == STATIC
        }


def read_description(folder: Path, config: Mapping[str, Any]) -> QuantDescription | None:
    """The description of the checkpoint in `folder`, or None if there is none or all of its weights are FLOAT.

    Raises ModelError: damaged, or unsupported_quantization for types and tensors that srv does not implement.
    """
    path, entries = _entries(folder, config)
    if entries is None:
        return None
    unsupported = sorted(name for name in entries if "." in name and not _is_supported(name))
    if unsupported:
        reason = f"it contains {unsupported[0]}, which srv does not load yet ({len(unsupported)} such tensors)"
        remedy = "Quantize without outlier suppression in the norms, and without KV cache quantization"
        raise ModelError("unsupported_quantization", path, reason, remedy)
    quant_types = {name: str(value) for name, value in entries.items() if name.endswith(".weight")}
    unknown = sorted(set(quant_types.values()) - set(QUANT_TYPES))
    if unknown:
        reason = f"it contains weights of type {', '.join(unknown)}, which srv does not load yet"
        raise ModelError("unsupported_quantization", path, reason, f"Use weights of the types {', '.join(QUANT_TYPES)}")
    return QuantDescription(path, quant_types) if set(quant_types.values()) - {FLOAT} else None


def _is_supported(name: str) -> bool:
    """Whether a layer of srv loads this tensor. Biases of norms come from outlier suppression and are not supported."""
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
        except (OSError, ValueError) as error:
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
