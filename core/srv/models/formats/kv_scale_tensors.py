"""Tensors of safetensors checkpoints that hold the scales of 8-bit keys and values. Torch-free.

Owns their names, which differ by the program that made a checkpoint, and reading their values. Must not know models.

    of keys      k_scale, k_proj.k_scale, k_proj.output_scale      after the number of the layer and the name of its
    of values    v_scale, v_proj.v_scale, v_proj.output_scale      attention ("model.layers.0.self_attn.k_scale")
    of both      kv_scale
    of neither   q_scale, q_proj.output_scale, prob_output_scale   which quantize attention itself
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

from srv.errors import ModelError

Part: TypeAlias = Literal["keys", "values", "both", "neither"]

_NAME = re.compile(r"(?:^|\.)(\d+)\.(?:.*\.)?(?:([kv]|kv|q)_scale|([kvq])_proj\.output_scale|(prob)_output_scale)$")
_PARTS: dict[str, Part] = {"k": "keys", "v": "values", "kv": "both"}
_FORMATS = {"F32": "<f", "F16": "<e", "F64": "<d", "BF16": "<f"}


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


def is_kv_scale(name: str) -> bool:
    return stored_scale(name) is not None


def read_scales(path: Path, names: Collection[str]) -> dict[str, float]:
    """The values of tensors of one element. The file's header has been checked before.

    Raises ModelError: dtype_mismatch for a dtype that is no float, and shape_mismatch for another number of elements.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        return {name: _value(path, name, header[name], file, 8 + length) for name in names}


def _value(path: Path, name: str, entry: Mapping[str, Any], file: BinaryIO, data: int) -> float:
    """`data`: where the tensors begin in the file."""
    begin, end = entry["data_offsets"]
    file.seek(data + begin)
    raw = file.read(end - begin)
    remedy = "Use a checkpoint with one scale per layer, or set --quantization-param-path to a file with scales"
    if entry["dtype"] not in _FORMATS:
        reason = f"tensor {name} is stored as {entry['dtype']}, but the scale of keys or values is a float"
        raise ModelError("dtype_mismatch", str(path), reason, remedy)
    raw = b"\0\0" + raw if entry["dtype"] == "BF16" and len(raw) == 2 else raw
    if len(raw) != struct.calcsize(_FORMATS[entry["dtype"]]):
        reason = f"tensor {name} has the shape {entry['shape']}, but keys and values have one scale per layer"
        raise ModelError("shape_mismatch", str(path), reason, remedy)
    value: float = struct.unpack(_FORMATS[entry["dtype"]], raw)[0]
    return value
