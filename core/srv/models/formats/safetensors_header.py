"""A strict reader of safetensors headers: names, dtypes, shapes and sizes, never the weights. Torch-free.

Owns the file format (https://huggingface.co/docs/safetensors) and the index of sharded checkpoints. Must not know any
architecture.

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from srv.errors import ModelError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
DOWNLOAD_AGAIN = "The file is incomplete or damaged: download it again and compare its checksum"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint. `dtype` is torch's name, or the format's own if torch has none; `size` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a folder, by name. `files`: the names in each file, by the path of the file."""

    tensors: Mapping[str, StoredTensor]
    files: Mapping[Path, tuple[str, ...]]


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the headers of a folder's safetensors files. None if it has no such file.

    Raises ModelError with code not_found (a file of the index is missing), truncated or damaged.
    """
    paths = _files(folder)
    if not paths:
        return None
    tensors: dict[str, StoredTensor] = {}
    files: dict[Path, tuple[str, ...]] = {}
    for path in paths:
        found = read_safetensors(path)
        duplicates = sorted(found.keys() & tensors.keys())
        if duplicates:
            raise ModelError("damaged", str(path), f"tensor {duplicates[0]} is also in another file", DOWNLOAD_AGAIN)
        tensors.update(found)
        files[path] = tuple(found)
    return Checkpoint(tensors, files)


def _files(folder: Path) -> list[Path]:
    """The weight files: those that the index names; else `model.safetensors`; else every *.safetensors file."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(
                "damaged", str(index), f"it is not an index of weight files ({error})", DOWNLOAD_AGAIN
            ) from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            reason = f"{len(missing)} of {len(names)} weight files are missing, first {missing[0]}"
            raise ModelError("not_found", str(folder), reason, "Download the missing files")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors in the header of one file. Checks that the data of every tensor is within the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or (length <= MAX_HEADER_BYTES and size < 8 + length):
            raise ModelError("truncated", str(path), f"it ends within its header, after {size} bytes", DOWNLOAD_AGAIN)
        if length > MAX_HEADER_BYTES:
            _damaged(path, f"its header claims {length} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        _damaged(path, f"its header is not valid JSON ({error})")
    if not isinstance(header, dict):
        _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, size - 8 - length) for name, entry in header.items()}


def _tensor(path: Path, name: str, entry: Any, data_bytes: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(axis) for axis in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        _damaged(path, f"the entry of tensor {name} cannot be read ({error!r})")
    if begin < 0 or end < begin or any(axis < 0 for axis in shape):
        _damaged(path, f"tensor {name} has the offsets {begin}..{end} and the shape {shape}")
    if end > data_bytes:
        reason = f"tensor {name} ends at data byte {end} and the file has {data_bytes}"
        raise ModelError("truncated", str(path), reason, DOWNLOAD_AGAIN)
    if dtype in DTYPES and end - begin != math.prod(shape) * _width(dtype):
        _damaged(path, f"tensor {name} of type {dtype} and shape {shape} cannot have {end - begin} bytes")
    return StoredTensor(DTYPES.get(dtype, dtype), shape, end - begin)


def _width(dtype: str) -> int:
    """Bytes per element, from the digits of the format's type name ("BF16": 2)."""
    return 1 if dtype == "BOOL" or dtype.startswith("F8") else int("".join(filter(str.isdigit, dtype))) // 8


def _damaged(path: Path, reason: str) -> NoReturn:
    raise ModelError("damaged", str(path), reason, DOWNLOAD_AGAIN)
