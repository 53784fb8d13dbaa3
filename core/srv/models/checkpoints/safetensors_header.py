"""A strict reader of safetensors headers: names, dtypes, shapes and sizes, never the weights. Torch-free.

Owns the file format (https://huggingface.co/docs/safetensors) and the index of sharded checkpoints. Must not know any
architecture, except for layers that predict further tokens (MTP) and scales of keys and values, which no layer reads.

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias

from srv.errors import ModelError
from srv.models.checkpoints.kv_scale_tensors import StoredScale, stored_scale

Stamps: TypeAlias = tuple[tuple[int, ...], ...]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
DOWNLOAD_AGAIN = "The file is incomplete or damaged: download it again and compare its checksum"
_OF_RANK = re.compile(r"-TP-(\d{3})\.safetensors$")
# By the names of matrices that are divided among ranks, the axis: of outputs, or of inputs.
_RANK_AXES: Mapping[str, int] = MappingProxyType({"w1": 0, "w3": 0, "w2": 1})
_PREDICTION = ".eh_proj.weight"  # joins the embedding of the next token and a hidden state
_OWN_PREDICTION = "mtp."  # where "fc" does it (Qwen), or the first of several layers (Nemotron 3)
_MIMO_PREDICTION = "model.mtp_layers."
_ERNIE_PREDICTION = "model.mtp_"  # where "linear_proj" does it
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_SETTLED_NS = 2_000_000_000  # a file that is older than this has another time of change once it is written again
# Of the types of which several elements share bytes: torch has none for one element. A type of neither table is damage.
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint. `dtype` is torch's name, or the format's own if torch has none; `size` in bytes.

    `begin`: its first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    size: int
    begin: int = 0


class RankShards(NamedTuple):
    """A tensor that several files have a part of, one of each rank. `axis`: along which they are joined.

    `parts`: by the path of the file, in their order; they have the same shape.
    """

    axis: int
    parts: Mapping[Path, StoredTensor]

    @property
    def whole(self) -> StoredTensor:
        """The joined tensor, which begins nowhere."""
        part, count = next(iter(self.parts.values())), len(self.parts)
        shape = tuple(size * (count if axis == self.axis else 1) for axis, size in enumerate(part.shape))
        return StoredTensor(part.dtype, shape, part.size * count)


class KVScaleTensor(NamedTuple):
    """A tensor with the scale of keys or values. `path`: of its file."""

    path: Path
    tensor: StoredTensor
    scale: StoredScale


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, by name, without those of layers that predict further tokens.

    `files`: the names in each file, by the path of the file. `kv_scales`: the scales of keys and values by name, which
    are no weights and not among `tensors`. `prediction`: the names of tensors of layers that predict further tokens.
    `shards`: the tensors that are divided among files, by name; they are among `tensors` as wholes, which begin
    nowhere, and among the names of the first of these files.
    """

    tensors: Mapping[str, StoredTensor]
    files: Mapping[Path, tuple[str, ...]]
    kv_scales: Mapping[str, KVScaleTensor] = field(default_factory=dict)
    prediction: tuple[str, ...] = ()
    shards: Mapping[str, RankShards] = field(default_factory=dict)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the headers of a folder's safetensors files. None if it has no such file.

    Headers are read once until `forget_headers`, unless a file changes. Raises ModelError with code not_found (a file
    is missing or cannot be read), truncated or damaged.
    """
    paths = _files(folder)
    if not paths:
        return None
    stamps = _stamps((*paths, folder / INDEX))
    return _read(folder, paths, stamps) if stamps else _read.__wrapped__(folder, paths, stamps)


def forget_headers() -> None:
    """Free the headers that `read_checkpoint` keeps: those of large models take tens of MiB."""
    _read.cache_clear()
    _weight_map.cache_clear()


def _stamps(paths: Iterable[Path]) -> Stamps:
    """What shows whether one of these files has changed; () if one has just been written, so that it would not show."""
    found: list[tuple[int, ...]] = []
    for path in paths:
        try:
            each = path.stat()
        except OSError:
            found.append(())
            continue
        if time.time_ns() - each.st_mtime_ns < _SETTLED_NS:
            return ()
        found.append((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns))
    return tuple(found)


@lru_cache(maxsize=2)  # of a model and its draft model
def _read(folder: Path, paths: tuple[Path, ...], stamps: Stamps) -> Checkpoint:
    headers = {path: read_safetensors(path) for path in paths}
    shards = _rank_shards(folder, headers)
    tensors: dict[str, StoredTensor] = {}
    files: dict[Path, tuple[str, ...]] = {}
    for path, header in headers.items():
        own = {name: tensor for name, tensor in header.items() if name not in shards}
        joined = {name: each.whole for name, each in shards.items() if path == next(iter(each.parts))}
        found = own | joined
        duplicates = sorted(found.keys() & tensors.keys())
        if duplicates:
            raise ModelError("damaged", str(path), f"tensor {duplicates[0]} is also in another file", DOWNLOAD_AGAIN)
        tensors.update(found)
        files[path] = tuple(found)
    _check_index(folder, files)
    further = _prediction_layers(tensors)
    scales = {
        name: KVScaleTensor(path, tensors[name], scale)
        for path, names in files.items()
        for name in names
        if (scale := stored_scale(name)) is not None
    }
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(further) and name not in scales}
    of_files = {path: tuple(name for name in names if name in kept) for path, names in files.items()}
    prediction = tuple(name for name in tensors if name.startswith(further))
    return Checkpoint(kept, of_files, scales, prediction, shards)


def _rank_shards(folder: Path, headers: Mapping[Path, Mapping[str, StoredTensor]]) -> dict[str, RankShards]:
    """The tensors of which the files of several ranks have a part, as in Grok 2: "…-TP-003.safetensors".

    Raises ModelError with code not_found, damaged or unsupported_format.
    """
    ranks = {path: int(match[1]) for path in headers if (match := _OF_RANK.search(path.name)) is not None}
    count = max(ranks.values(), default=-1) + 1
    parts: dict[str, dict[int, Path]] = {}
    for path, rank in ranks.items():
        for name in headers[path]:
            parts.setdefault(name, {})[rank] = path
    shards: dict[str, RankShards] = {}
    for name, paths in parts.items():
        missing = sorted(set(range(count)) - set(paths))
        if missing:
            example = next(iter(paths.values())).name
            reason = f"the part of rank {missing[0]} of tensor {name} is missing, beside {example}"
            raise ModelError("not_found", str(folder), reason, "Download the missing files")
        tensors = {paths[rank]: headers[paths[rank]][name] for rank in range(count)}
        axis = _RANK_AXES.get(name.removesuffix(".weight").rpartition(".")[2])
        if axis is None:
            reason = f"tensor {name} is divided among the files of {count} ranks, and its name does not say along"
            reason += " which axis"
            raise ModelError("unsupported_format", str(folder), reason, "Join the parts into one file")
        if len({(each.dtype, each.shape) for each in tensors.values()}) > 1:
            _damaged(next(iter(tensors)), f"its part of tensor {name} has another shape than those of other ranks")
        shards[name] = RankShards(axis, tensors)
    return shards


def _prediction_layers(names: Iterable[str]) -> tuple[str, ...]:
    """The prefixes of layers that predict further tokens (MTP), which are not served: those after the model's own."""
    joined = {
        f"{_OWN_PREDICTION}fc.weight": _OWN_PREDICTION,
        f"{_OWN_PREDICTION}layers.0{_PREDICTION}": _OWN_PREDICTION,
        f"{_ERNIE_PREDICTION}linear_proj.0.weight": _ERNIE_PREDICTION,
    }
    ends = (name for name in names if name.endswith(_PREDICTION) or name in joined)
    found = (joined.get(name, name.removesuffix(_PREDICTION[1:])) for name in ends)
    return (*found, _MIMO_PREDICTION)


def _files(folder: Path) -> tuple[Path, ...]:
    """The weight files: those that the index names; else `model.safetensors`; else every *.safetensors file."""
    names = weight_files(folder, [path.name for path in folder.glob("*.safetensors")])
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        reason = f"{len(missing)} of {len(names)} weight files are missing, first {missing[0]}"
        raise ModelError("not_found", str(folder), reason, "Download the missing files")
    return tuple(folder / name for name in names)


def weight_files(folder: Path, offered: Collection[str]) -> list[str]:
    """The names of the weight files of a folder, of which these *.safetensors files are offered, present or not.

    Raises ModelError: damaged for an index that is none or names a file out of the folder, or not_found.
    """
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE] if SINGLE in offered else sorted(offered)
    return sorted(set(_index(index).values()))


def _index(path: Path) -> Mapping[str, str]:
    """As `_weight_map`; of a file that has not changed, it is read once."""
    stamps = _stamps((path,))
    return _weight_map(path, stamps) if stamps else _weight_map.__wrapped__(path, stamps)


@lru_cache(maxsize=2)
def _weight_map(index: Path, stamps: Stamps) -> Mapping[str, str]:
    """The file of each tensor, as an index says. Raises ModelError: damaged for an index that is none, or not_found."""
    try:
        files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items())
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(
            "damaged", str(index), f"it is not an index of weight files ({error})", DOWNLOAD_AGAIN
        ) from error
    unusable = [name for name in files.values() if not isinstance(name, str) or "\0" in name]
    if unusable:
        _damaged(index, f"weight_map names {unusable[0]!r} as a file; it must be a string")
    for name, file in files.items():
        if leaves_folder(file):
            _damaged(index, f"weight_map names {file!r} as the file of tensor {name}; it must be in the same folder")
    return files


def leaves_folder(name: str) -> bool:
    """Whether the name of a file leads out of its folder. Links are not followed: the hub's cache consists of them."""
    path = PurePath(name)
    return path.is_absolute() or ".." in path.parts


def _check_index(folder: Path, files: Mapping[Path, tuple[str, ...]]) -> None:
    """Refuse a folder whose index, if it has one, names a tensor that is in none of its files."""
    index = folder / INDEX
    if not index.is_file():
        return
    stored = {name for names in files.values() for name in names}
    for name, file in _index(index).items():
        if name not in stored:
            _damaged(folder / file, f"{INDEX} says that it has tensor {name}, and no weight file of the folder does")


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors in the header of one file. Checks that their data fill the rest of the file, one after the other."""
    try:
        size, raw = _header(path)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _damaged(path, f"its header is not valid JSON ({error})")
    if not isinstance(header, dict):
        _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + len(raw), size) for name, entry in header.items()}
    _check_layout(path, {name: entry["data_offsets"] for name, entry in header.items()}, size - 8 - len(raw))
    return tensors


def _header(path: Path) -> tuple[int, bytes]:
    """The size of the file, and its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or (length <= MAX_HEADER_BYTES and size < 8 + length):
            raise ModelError("truncated", str(path), f"it ends within its header, after {size} bytes", DOWNLOAD_AGAIN)
        if length > MAX_HEADER_BYTES:
            _damaged(path, f"its header claims {length} bytes")
        return size, file.read(length)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these members. Raises ValueError for a name that occurs twice, of which JSON keeps the last."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return members


def _check_layout(path: Path, offsets: Mapping[str, tuple[int, int]], data_bytes: int) -> None:
    """Refuse tensors that overlap, and bytes that belong to none."""
    end, last = 0, ""
    for name, (begin, after) in sorted(offsets.items(), key=lambda item: (*item[1], item[0])):
        if begin < end:
            _damaged(path, f"tensors {last} and {name} overlap: bytes {begin}..{end} belong to both")
        if begin > end:
            _damaged(path, f"its data bytes {end}..{begin}, before tensor {name}, belong to no tensor")
        end, last = after, name
    if end != data_bytes:
        _damaged(path, f"its data bytes {end}..{data_bytes} belong to no tensor")


def _tensor(path: Path, name: str, entry: Any, start: int, file_bytes: int) -> StoredTensor:
    """`start`: the first byte of the data in the file."""
    data_bytes = file_bytes - start
    try:
        dtype, shape = entry["dtype"], tuple(_integer(axis) for axis in entry["shape"])
        begin, end = (_integer(offset) for offset in entry["data_offsets"])
        bits = PACKED_BITS[dtype] if dtype in PACKED_BITS else 8 * _width(dtype)
    except (KeyError, TypeError, ValueError) as error:
        _damaged(path, f"the entry of tensor {name} cannot be read ({error!r})")
    if begin < 0 or end < begin or any(axis < 0 for axis in shape):
        _damaged(path, f"tensor {name} has the offsets {begin}..{end} and the shape {shape}")
    if end > data_bytes:
        reason = f"tensor {name} ends at data byte {end} and the file has {data_bytes}"
        raise ModelError("truncated", str(path), reason, DOWNLOAD_AGAIN)
    if 8 * (end - begin) != math.prod(shape) * bits:
        _damaged(path, f"tensor {name} of type {dtype} and shape {shape} cannot have {end - begin} bytes")
    return StoredTensor(DTYPES.get(dtype, dtype), shape, end - begin, start + begin)


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _width(dtype: str) -> int:
    """Bytes per element of a type of `DTYPES`, from the digits of its name ("BF16": 2)."""
    if dtype not in DTYPES:
        raise ValueError(f"{dtype!r} is no type of safetensors")
    return 1 if dtype == "BOOL" or dtype.startswith("F8") else int("".join(filter(str.isdigit, dtype))) // 8


def unreadable(path: Path, error: OSError) -> ModelError:
    reason = f"it cannot be read ({error.strerror})"
    return ModelError("not_found", str(path), reason, "Give the path of a model that this user may read")


def _damaged(path: Path, reason: str) -> NoReturn:
    raise ModelError("damaged", str(path), reason, DOWNLOAD_AGAIN)
