"""Tensors of safetensors checkpoints that hold the scales of 8-bit keys and values. Torch-free.

Owns their names, which differ by the program that made a checkpoint, and reading their values. Must not know models.

    of keys      k_scale, k_proj.k_scale, k_proj.output_scale      after the number of the layer and the name of its
    of values    v_scale, v_proj.v_scale, v_proj.output_scale      attention ("model.layers.0.self_attn.k_scale")
    of both      kv_scale
    of neither   q_scale, q_proj.output_scale, prob_output_scale   which quantize attention itself
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, TypeAlias

from srv.errors import ModelError

if TYPE_CHECKING:
    from srv.models.checkpoints.safetensors_header import StoredTensor

Part: TypeAlias = Literal["keys", "values", "both", "neither"]

_NAME = re.compile(r"(?:^|\.)(\d+)\.(?:.*\.)?(?:([kv]|kv|q)_scale|([kvq])_proj\.output_scale|(prob)_output_scale)$")
_PARTS: dict[str, Part] = {"k": "keys", "v": "values", "kv": "both"}
_FORMATS = {"float32": "<f", "float16": "<e", "float64": "<d", "bfloat16": "<f"}


class StoredScale(NamedTuple):
    """The layer whose keys or values a tensor scales."""

    layer: int
    part: Part


def stored_scale(name: str) -> StoredScale | None:
    """What a tensor of this name scales; None for one that is no such scale."""
    found = _NAME.search(name)
    if found is None:
        return None
    return StoredScale(int(found[1]), _PARTS.get(found[2] or found[3] or found[4], "neither"))


def read_scales(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, float]:
    """The values of tensors of one element, which the header of a file describes, by their names.

    Raises ModelError: dtype_mismatch for a dtype that is no float, and shape_mismatch for another number of elements.
    """
    with path.open("rb") as file:
        return {name: _value(path, name, tensor, file) for name, tensor in tensors.items()}


def _value(path: Path, name: str, tensor: StoredTensor, file: BinaryIO) -> float:
    remedy = "Use a checkpoint with one scale per layer, or set --quantization-param-path to a file with scales"
    if tensor.dtype not in _FORMATS:
        reason = f"tensor {name} is stored as {tensor.dtype}, but the scale of keys or values is a float"
        raise ModelError("dtype_mismatch", str(path), reason, remedy)
    if math.prod(tensor.shape) != 1:
        reason = f"tensor {name} has the shape {list(tensor.shape)}, but keys and values have one scale per layer"
        raise ModelError("shape_mismatch", str(path), reason, remedy)
    file.seek(tensor.begin)
    raw = file.read(tensor.size)
    if tensor.dtype == "bfloat16":
        raw = b"\0\0" + raw  # the upper half of a float32
    value: float = struct.unpack(_FORMATS[tensor.dtype], raw)[0]
    return value
