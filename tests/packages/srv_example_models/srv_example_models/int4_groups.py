"""The facts of checkpoints of 4-bit weights in groups. Torch-free; `int4_groups_layers` computes.

    weight_packed   uint8 [out, in / 2]: column 2i in the low four bits of byte i, column 2i + 1 in the high ones
    weight_scale    float32 [out, in / group_size]

A weight is (q - 8) · scale of its group, where q is the stored number from 0 to 15. config.json has
`"quantization_config": {"quant_method": "int4_groups", "bits": 4, "group_size": 32}`. Layers without `weight_packed`
are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srv.errors import ModelError
from srv.quantization.method import QuantMethod, StoredModel
from srv.quantization.schemes import HeldTensor, LayerSchemes, Matrix, Scheme
from srv.specs import ModelFacts

NAME = "int4_groups"


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping) or quant_config.get("quant_method") != NAME:
        return False
    bits, size = quant_config.get("bits"), quant_config.get("group_size")
    if bits != 4:
        return f"it has weights of {bits} bits, not 4"
    if not isinstance(size, int) or size < 2 or size % 2:
        return f"its group_size is {size!r}, not an even number of weights"
    return True


def group_size(model: ModelFacts) -> int:
    """The number of weights that share a scale."""
    return int(model.config["quantization_config"]["group_size"])


class Int4(Scheme):
    """Packed weights stay as they are stored, and their scales are float32 whatever the model's dtype."""

    op = ""  # no platform has one for them

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def tensors(self, matrix: Matrix) -> tuple[HeldTensor, ...]:
        outputs = sum(matrix.outputs)
        return (
            HeldTensor("weight_packed", (outputs, matrix.inputs // 2), "uint8"),
            HeldTensor("weight_scale", (outputs, matrix.inputs // self._group_size), "float32"),
        )


def schemes(model: StoredModel) -> LayerSchemes:
    """Layers that have packed weights; those that share one input must be alike.

    Raises ModelError for layers that cannot be held so.
    """
    held, size, path = Int4(group_size(model.facts)), group_size(model.facts), model.facts.path

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Int4 | None:
        packed = [name for name in names if f"{name}.weight_packed" in model.types]
        if not packed:
            return None
        if len(packed) < len(names):
            reason = f"of {', '.join(names)}, which share one input, only {', '.join(packed)} are quantized"
            raise ModelError("unsupported_quantization", path, reason, "Quantize all of them or none")
        if inputs % size:
            reason = f"the {inputs} inputs of {packed[0]} are not groups of {size}"
            raise ModelError("unsupported_quantization", path, reason, "Quantize with another group_size")
        return held

    return scheme


METHOD = QuantMethod(
    name=NAME,
    layers="srv_example_models.int4_groups_layers:Int4LayerFactory",
    detect=detect,
    schemes=schemes,
)
