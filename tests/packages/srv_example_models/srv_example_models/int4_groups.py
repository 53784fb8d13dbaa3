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

from srv.quantization.method import QuantMethod
from srv.specs import ModelFacts

NAME = "int4_groups"


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping) or stated.get("quant_method") != NAME:
        return False
    bits, size = stated.get("bits"), stated.get("group_size")
    if bits != 4:
        return f"it has weights of {bits} bits, not 4"
    if not isinstance(size, int) or size < 2 or size % 2:
        return f"its group_size is {size!r}, not an even number of weights"
    return True


def group_size(model: ModelFacts) -> int:
    """The number of weights that share a scale."""
    return int(model.config["quantization_config"]["group_size"])


def weight_bytes(model: ModelFacts, item_size: int, projection_params: int) -> int:
    """Packed weights stay as they are stored, and their scales are float32 whatever the model's dtype."""
    packed = model.stored_types.get("uint8", 0)
    scales = 2 * packed // group_size(model)
    return packed + 4 * scales + (model.parameters - packed - scales) * item_size


METHOD = QuantMethod(
    name=NAME,
    layers="srv_example_models.int4_groups_layers:Int4LayerFactory",
    detect=detect,
    weight_bytes=weight_bytes,
)
