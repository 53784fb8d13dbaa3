"""The tensors of safetensors files, whole or in part, from memory that maps a file or by reading it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.reading import FileBytes
from srv.models.checkpoints.safetensors_header import DOWNLOAD_AGAIN, Checkpoint, RankShards, StoredTensor
from srv.models.checkpoints.slices import Slice


class StoredFile(Protocol):
    """Any thread may ask for tensors."""

    def get(self, name: str, part: Slice | None) -> Tensor:
        """A tensor, or a part of it, in host memory. Raises ModelError."""


@contextmanager
def open_tensors(checkpoint: Checkpoint, names: Collection[str], *, mapped: bool) -> Iterator[dict[str, StoredFile]]:
    """What reads each of these tensors, in the order of the files. Raises ModelError (damaged)."""
    paths = {name: path for path, stored in checkpoint.files.items() for name in stored if name in names}
    shards = {name: checkpoint.shards[name] for name in paths if name in checkpoint.shards}
    of_ranks = (path for each in shards.values() for path in each.parts)
    with ExitStack() as stack:
        opened: dict[Path, StoredFile] = {}
        for path in dict.fromkeys((*paths.values(), *of_ranks)):
            own = {name: each.parts[path] for name, each in shards.items() if path in each.parts}
            opened[path] = stack.enter_context(open_file(path, {**checkpoint.tensors, **own}, mapped=mapped))
        yield {name: _Joined(shards[name], opened) if name in shards else opened[path] for name, path in paths.items()}


@contextmanager
def open_file(path: Path, tensors: Mapping[str, StoredTensor], *, mapped: bool) -> Iterator[StoredFile]:
    """`tensors`: at least those of the file. Raises ModelError (damaged)."""
    if not mapped:
        with FileBytes(path) as data:
            yield _Read(path, data, tensors)
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield _Mapped(path, file)
    except SafetensorError as error:
        raise _damaged(path, error) from error


class _Mapped:
    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file

    def get(self, name: str, part: Slice | None) -> Tensor:
        try:
            if part is None:
                tensor: Tensor = self._file.get_tensor(name)
                return tensor
            lazy = self._file.get_slice(name)
            return _joined([lazy[b:e] if part.axis == 0 else lazy[:, b:e] for b, e in part.ranges], part)
        except SafetensorError as error:
            raise _damaged(self._path, error) from error


class _Read:
    def __init__(self, path: Path, data: FileBytes, tensors: Mapping[str, StoredTensor]) -> None:
        self._path, self._data, self._tensors = path, data, tensors

    def get(self, name: str, part: Slice | None) -> Tensor:
        stored = self._tensors[name]
        dtype = getattr(torch, stored.dtype, None)
        if not isinstance(dtype, torch.dtype):
            reason = f"tensor {name} is of type {stored.dtype}, which cannot be read without mapping the file"
            remedy = "Leave out --weight-loader-disable-mmap"
            raise ModelError("unsupported_format", str(self._path), reason, remedy)
        if part is None or part.axis != 0:
            tensor = self._read(stored.begin, stored.size, dtype).view(stored.shape)
            return tensor if part is None else _joined([tensor[:, begin:end] for begin, end in part.ranges], part)
        row, shape = stored.size // part.total, stored.shape[1:]
        rows = ((stored.begin + begin * row, end - begin) for begin, end in part.ranges)
        return _joined([self._read(at, count * row, dtype).view(count, *shape) for at, count in rows], part)

    def _read(self, begin: int, size: int, dtype: torch.dtype) -> Tensor:
        """Flat."""
        return torch.frombuffer(self._data.read(begin, size), dtype=dtype) if size else torch.empty(0, dtype=dtype)


def _joined(ranges: list[Tensor], part: Slice) -> Tensor:
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges, part.axis)


class _Joined:
    """A tensor that is divided among the files of several ranks."""

    def __init__(self, shards: RankShards, files: Mapping[Path, StoredFile]) -> None:
        self._shards, self._files = shards, files

    def get(self, name: str, part: Slice | None) -> Tensor:
        axis, found, begin = self._shards.axis, list[Tensor](), 0
        for path, stored in self._shards.parts.items():
            size = stored.shape[axis]
            own = part
            if part is not None and part.axis == axis:
                first, last = (min(max(end - begin, 0), size) for end in (part.begin, part.end))
                own = Slice(axis, first, last, size)
            if own is None or own.end > own.begin:
                found.append(self._files[path].get(name, own))
            begin += size
        return torch.cat(found, axis)


def _damaged(path: Path, error: SafetensorError) -> ModelError:
    return ModelError("damaged", str(path), f"its weights cannot be read ({error})", DOWNLOAD_AGAIN)
