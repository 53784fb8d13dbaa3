"""The tensors of one safetensors file, whole or in part, from memory that maps the file or by reading it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.reading import FileBytes
from srv.models.checkpoints.safetensors_header import DOWNLOAD_AGAIN, StoredTensor
from srv.models.checkpoints.slices import Slice


class StoredFile(Protocol):
    """Any thread may ask for tensors."""

    def get(self, name: str, part: Slice | None) -> Tensor:
        """A tensor, or a part of it, in host memory. Raises ModelError."""


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
            cut: Tensor = lazy[part.begin : part.end] if part.axis == 0 else lazy[:, part.begin : part.end]
            return cut
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
        begin, size, shape = stored.begin, stored.size, stored.shape
        if part is not None and part.axis == 0:
            row = size // part.total
            begin, size = begin + part.begin * row, (part.end - part.begin) * row
            shape = (part.end - part.begin, *shape[1:])
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(self._data.read(begin, size), dtype=dtype).view(shape)
        return tensor if part is None or part.axis == 0 else tensor[:, part.begin : part.end]


def _damaged(path: Path, error: SafetensorError) -> ModelError:
    return ModelError("damaged", str(path), f"its weights cannot be read ({error})", DOWNLOAD_AGAIN)
