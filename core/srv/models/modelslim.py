"""Checkpoints of the tool modelslim: which tensor is stored in which way. Torch-free.

Owns the description file, `quant_model_description*.json` (or the same map within `quantization_config`), which names
a kind for every stored tensor. Must not know layers.

    FLOAT           the checkpoint's own type
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
KINDS = (FLOAT, STATIC, DYNAMIC)
_FILES = "quant_model_description*.json"
_WHOLE = "model_quant_type"  # the kind of most layers; it marks a description within `config.json`
_SUFFIXES = (
    *("weight", "bias", "weight_scale", "weight_offset"),
    *("input_scale", "input_offset", "quant_bias", "deq_scale"),
)
# Stored beside a layer of kind W8A8 by some versions of the tool, and already contained in its other tensors.
_CONTAINED = ("weight_scale", "weight_offset", "bias")


class Description:
    """The kinds of a checkpoint's linear layers."""

    def __init__(self, path: str, kinds: Mapping[str, str]) -> None:
        self._path, self._kinds = path, kinds

    def kind(self, names: Iterable[str]) -> str:
        """The kind of layers that are multiplied as one; those not described are FLOAT. ModelError if they differ."""
        found = {name: self._kinds.get(f"{name}.weight", FLOAT) for name in names}
        if len(set(found.values())) > 1:
            told = ", ".join(f"{name} is {kind}" for name, kind in found.items())
            raise ModelError(
                "unsupported_quantization",
                self._path,
                f"layers that share one input are quantized differently ({told})",
                "Quantize them alike: name all of them, or none, where the tool is told which layers stay FLOAT",
            )
        return next(iter(found.values()))

    def ignored(self, names: Iterable[str]) -> set[str]:
        """Stored tensors that no layer needs: they repeat what other tensors of a W8A8 layer hold."""
        return {
            name
            for name in names
            if name.rpartition(".")[2] in _CONTAINED and self._kinds.get(f"{name.rpartition('.')[0]}.weight") == STATIC
        }


def read_description(folder: Path, config: Mapping[str, Any]) -> Description | None:
    """The folder's description, or None if it has none and all is stored as `config` says.

    Raises ModelError: damaged, or unsupported_quantization for kinds that cannot be multiplied yet.
    """
    path, entries = _entries(folder, config)
    if entries is None:
        return None
    strange = sorted(name for name in entries if "." in name and not _known(name))
    if strange:
        reason = f"it holds {strange[0]}, which srv does not load yet ({len(strange)} such tensors)"
        remedy = "Quantize without moving outliers into norms, and with keys and values left as they are"
        raise ModelError("unsupported_quantization", path, reason, remedy)
    kinds = {name: str(kind) for name, kind in entries.items() if name.endswith(".weight")}
    foreign = sorted(set(kinds.values()) - set(KINDS))
    if foreign:
        reason = f"it holds weights of kind {', '.join(foreign)}, which srv does not load yet"
        raise ModelError("unsupported_quantization", path, reason, f"Use a checkpoint of {', '.join(KINDS)}")
    return Description(path, kinds) if set(kinds.values()) - {FLOAT} else None


def _known(name: str) -> bool:
    """Whether a described tensor is one that layers are made of. Biases of norms are what is left of outliers."""
    owner, _, suffix = name.rpartition(".")
    return suffix in _SUFFIXES and not (suffix == "bias" and owner.endswith("norm"))


def _entries(folder: Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    files = sorted(folder.glob(_FILES))
    if len(files) > 1:
        reason = f"it has {len(files)} descriptions of its weights ({', '.join(file.name for file in files)})"
        raise ModelError("damaged", str(folder), reason, "Keep the one that belongs to the weights")
    if files:
        try:
            entries = json.loads(files[0].read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = f"it cannot be read as JSON ({error})"
            raise ModelError("damaged", str(files[0]), reason, "Fetch the file again") from error
        if not isinstance(entries, dict):
            raise ModelError("damaged", str(files[0]), f"it is a JSON {type(entries).__name__}", "Fetch the file again")
        return str(files[0]), entries
    nested = config.get("quantization_config")
    if isinstance(nested, Mapping) and _WHOLE in nested:
        return str(folder / "config.json"), nested
    return str(folder), None
