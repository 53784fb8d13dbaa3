"""How the tensors of a checkpoint become those of a model: as they are, told otherwise, or rounded on the way.

Owns the differences in names, shapes and types between what is stored and what layers hold, tensor by tensor, so
that no second copy of a model is ever made. Must not know files or layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from srv.models.int8 import rounded_at_load
from srv.models.modelslim import Description

_SCALE = ".weight_scale"
_STEPS = 127


class Storage:
    """Tensors are stored as layers hold them, but for the precision of their numbers."""

    def ignored(self, names: Collection[str]) -> set[str]:
        """Those of the stored names that no layer needs."""
        return set()

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The names and shapes of what `tensors` makes of all stored ones."""
        return dict(stored)

    def tensors(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        """What a stored tensor becomes."""
        return {name: stored}


class ModelslimStorage(Storage):
    """As modelslim stores them: `description` says which tensors repeat others.

    `deq_scale` of checkpoints for float16 is int64 [out], each with the bits of a float32 in its lower half, as one
    kernel wants them; `input_offset` is a whole number, in whatever dtype.
    """

    def __init__(self, description: Description) -> None:
        self._description = description

    def ignored(self, names: Collection[str]) -> set[str]:
        return self._description.ignored(names)

    def tensors(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if name.endswith(".deq_scale") and stored.dtype is torch.int64:
            stored = (stored & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
        return {name: stored.float() if name.endswith(".input_offset") else stored}


class Int8Storage(Storage):
    """Scales of a row each, [out, 1] or [out]."""

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {
            name: (*shape, 1) if name.endswith(_SCALE) and len(shape) == 1 else shape for name, shape in stored.items()
        }

    def tensors(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        return {name: stored.unsqueeze(1) if name.endswith(_SCALE) and stored.dim() == 1 else stored}


class RoundedStorage(Storage):
    """Plain numbers; the weights of projections are rounded as they are read."""

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        owners = {name.removesuffix(".weight"): shape for name, shape in stored.items() if _rounds(name)}
        return {**stored, **{f"{owner}{_SCALE}": (shape[0], 1) for owner, shape in owners.items()}}

    def tensors(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if not _rounds(name):
            return {name: stored}
        whole, scale = rounded(stored)
        return {name: whole, f"{name.removesuffix('.weight')}{_SCALE}": scale}


def _rounds(name: str) -> bool:
    owner, _, suffix = name.rpartition(".")
    return suffix == "weight" and rounded_at_load(owner)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of each row's own size, 127 to its largest magnitude: [out, in] -> int8 [out, in], float32 [out, 1]."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / _STEPS
    return (wide / torch.where(scale == 0, 1.0, scale)).round_().to(torch.int8), scale
