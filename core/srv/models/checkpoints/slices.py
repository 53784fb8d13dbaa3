"""The part of a stored tensor that a rank holds. Torch-free.

A layer that is sharded over ranks names, for each tensor that a loader fills, the slice of the checkpoint's tensor that
belongs there; without one it is the whole tensor. Loaders read these slices only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias


class Slice(NamedTuple):
    """The elements [begin, end) of one axis (0: rows, 1: columns) of a tensor that has `total` along it."""

    axis: int
    begin: int
    end: int
    total: int

    @property
    def is_empty(self) -> bool:
        """Whether other ranks hold all of the tensor, and this one nothing."""
        return self.begin == self.end

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the stored tensor, from that of the slice."""
        return (*shape[: self.axis], self.total, *shape[self.axis + 1 :])

    def scaled(self, numerator: int, denominator: int) -> Slice:
        """The same slice in other units, at whose borders it begins and ends: the bytes of blocks, or their scales."""
        begin, end, total = (value * numerator // denominator for value in self[1:])
        return Slice(self.axis, begin, end, total)


ELSEWHERE = Slice(0, 0, 0, 0)  # all of a tensor is on other ranks, and its shape is not known here

Slices: TypeAlias = Mapping[str, Slice]  # by the name that the model has for a tensor


def stored_shape(shape: Sequence[int], part: Slice | None) -> tuple[int, ...]:
    """The shape that the checkpoint's tensor must have if its slice `part` (None: all of it) has `shape`."""
    return tuple(shape) if part is None else part.whole(shape)
