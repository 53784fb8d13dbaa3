"""How a checkpoint stores tensors, and how they are converted to those of the model's layers.

Owns the names, shapes and dtypes, one tensor at a time, so that loading never makes a second copy of the whole model.
Must not know files or layers. Quantization methods specialise it (`srv.quantization.method`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from torch import Tensor


class StorageFormat:
    """The format of unquantized checkpoints: tensors are stored as the layers hold them, except for the dtype."""

    def parts(self, name: str) -> tuple[str, ...]:
        """The names of the tensors that a stored one is divided into; only a fused one has several."""
        return (name,)

    def is_read_whole(self, name: str) -> bool:
        """Whether a rank that needs a part of a tensor has to read and convert all of it: whatever is converted."""
        return type(self).convert is not StorageFormat.convert or len(self.parts(name)) > 1

    def unused(self, names: Collection[str]) -> set[str]:
        """Those of the stored names that no layer needs."""
        return set()

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The names and shapes of all converted tensors, from those of all stored ones."""
        return dict(stored)

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        """The model's tensors that one stored tensor becomes, by name. Several threads may call this at a time."""
        return {name: stored}


class TensorGroups:
    """Stored tensors that are converted together, until all of an owner are there. Any thread may add one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def add(self, owner: str, suffix: str, stored: Tensor, count: int) -> dict[str, Tensor] | None:
        """The tensors of `owner` by their suffixes if this is the last one of `count`; else None."""
        with self._lock:
            group = self._waiting.setdefault(owner, {})
            group[suffix] = stored
            return self._waiting.pop(owner) if len(group) == count else None
