"""Divides the tensors of checkpoints that hold a projection of all experts at once.

Their names and shapes are those of `srv.models.checkpoints.expert_tensors`. The checkpoints of some architectures have
the last two axes of weights exchanged, and may have the columns of gate and up projection in turn. Must not know files
or methods of quantization: what it makes of a tensor, scales included, is converted further by another format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from srv.models.checkpoints.expert_tensors import INPUT_SCALE, Division, divisions
from srv.models.checkpoints.rules import ExpertColumns
from srv.models.checkpoints.storage import StorageFormat


class StackedExpertStorage(StorageFormat):
    """`inner`: the format of the divided tensors, and of all others. `columns`: as `StackedExperts.columns`."""

    def __init__(self, inner: StorageFormat, columns: ExpertColumns = "") -> None:
        self._inner, self._columns = inner, columns
        self._divisions: dict[str, Division] = {}  # of each fused tensor, once `shapes` has seen it

    def parts(self, name: str) -> tuple[str, ...]:
        """Those that the inner format makes of what the tensor is divided into."""
        division = self._divisions.get(name)
        if division is None:
            return self._inner.parts(name)
        return tuple(dict.fromkeys(made for part in division.parts for made in self._inner.parts(part)))

    def is_read_whole(self, name: str) -> bool:
        return name in self._divisions or self._inner.is_read_whole(name)

    def unused(self, names: Collection[str]) -> set[str]:
        return self._inner.unused(names)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        self._divisions = dict(divisions(stored, self._columns))
        found = {name: shape for name, shape in stored.items() if name not in self._divisions}
        for division in self._divisions.values():
            found |= dict.fromkeys(division.parts, division.shape)
        return self._inner.shapes(found)

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        division = self._divisions.get(name)
        if division is None:
            return self._inner.convert(name, stored)
        divided = self._scales if division.tensor.is_scale else self._rows
        converted: dict[str, Tensor] = {}
        for part, tensor in zip(division.parts, divided(division, stored), strict=True):
            converted |= self._inner.convert(part, tensor)
        return converted

    def _rows(self, division: Division, stored: Tensor) -> Iterator[Tensor]:
        """Those of a weight or a bias."""
        if division.columns == "rows":
            experts = stored.chunk(len(division.parts))
            return (each.t() for each in experts) if division.tensor.is_down else iter(experts)
        rows = stored.transpose(1, 2) if division.columns and stored.dim() > 2 else stored
        return (part for expert in rows for part in _divided(division, expert))

    def _scales(self, division: Division, stored: Tensor) -> Iterator[Tensor]:
        count = len(division.tensor.projections)
        experts = len(division.parts) // count
        if division.tensor.suffix == INPUT_SCALE:  # which nothing multiplies by: it is checked only
            yield from [stored] * len(division.parts)
            return
        match division.kind:
            case "all":
                yield from stored.reshape(1).expand(len(division.parts))
            case "expert":
                yield from stored.reshape(experts).repeat_interleave(count)
            case "projection":
                yield from stored.reshape(-1)
            case "output":
                for expert in stored.reshape(experts, -1, 1):
                    yield from _divided(division, expert)
            case "group":
                for expert in stored:
                    yield from expert.chunk(count, 1)
            case "block":
                for expert in stored:
                    yield from expert.chunk(count)


def _divided(division: Division, rows: Tensor) -> tuple[Tensor, ...]:
    """The rows of each projection of one expert."""
    count = len(division.tensor.projections)
    return tuple(rows[part::count] for part in range(count)) if division.columns == "pairs" else rows.chunk(count)
