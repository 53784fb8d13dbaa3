"""The tensors of safetensors files as a storage format converts them, each when it is asked for.

For models that another library fills, which wants tensors by name. Must not know architectures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from srv.models.checkpoints.reading import MAPPED, Reading
from srv.models.checkpoints.safetensors_file import StoredFile, open_tensors
from srv.models.checkpoints.safetensors_header import Checkpoint
from srv.models.checkpoints.storage import StorageFormat


class ConvertedTensor:
    """A tensor that is read and converted by `tensor[...]`, as transformers reads tensors of files. It is read once."""

    def __init__(self, name: str, group: _Group) -> None:
        self._name, self._group = name, group

    def __getitem__(self, part: Any) -> Tensor:
        return self._group.take(self._name)[part]


@dataclass
class _Group:
    """Stored tensors that become `parts` together. `sources`: their names in files, and those for `storage`."""

    storage: StorageFormat
    sources: dict[str, str]
    parts: set[str]
    files: dict[str, StoredFile] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, name: str) -> Tensor:
        with self.lock:
            if name not in self.made:
                for stored, source in self.sources.items():
                    self.made |= self.storage.convert(source, self.files[stored].get(stored, None))
            return self.made.pop(name)


@contextmanager
def converted_tensors(
    checkpoint: Checkpoint,
    storage: StorageFormat,
    rename: Callable[[str], str | None],
    is_known: Callable[[str], bool],
    reading: Reading = MAPPED,
) -> Iterator[dict[str, ConvertedTensor]]:
    """By the name of each converted tensor, the tensor; they can be read until the context ends.

    `rename`: as of `load_safetensors`. `is_known`: whether the model has a tensor of this name.
    """
    names = {stored: name for stored in checkpoint.tensors if (name := rename(stored)) is not None}
    shapes = storage.shapes({name: checkpoint.tensors[stored].shape for stored, name in names.items()})
    unused = storage.unused({name for name in shapes if not is_known(name)})
    groups = _groups(names, storage)
    with open_tensors(checkpoint, names, mapped=reading.mapped) as opened:
        for group in groups.values():
            group.files = {stored: opened[stored] for stored in group.sources}
        yield {name: ConvertedTensor(name, groups[name]) for name in shapes if name in groups and name not in unused}


def _groups(names: Mapping[str, str], storage: StorageFormat) -> dict[str, _Group]:
    """By the name of each converted tensor, the stored ones from which it is made, with all that share one of them."""
    groups: dict[str, _Group] = {}
    for stored, name in names.items():
        parts = storage.parts(name)
        group = _Group(storage, {stored: name}, set(parts))
        for other in {id(each): each for part in parts if (each := groups.get(part)) is not None}.values():
            group.sources |= other.sources
            group.parts |= other.parts
        groups |= dict.fromkeys(group.parts, group)
    return groups
