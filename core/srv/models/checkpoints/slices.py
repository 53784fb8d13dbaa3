"""The part of a stored tensor that a rank holds. Torch-free.

A layer that is sharded over ranks names, for each tensor that a loader fills, the slice of the checkpoint's tensor that
belongs there; without one it is the whole tensor. Loaders read these slices only.

    one section, two ranks                 q q q q q q q q                rank 0: [0, 4)
    three sections (fused projections)     q q q q │ k k │ v v            rank 0: [0, 2), [4, 5), [6, 7)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from srv.dist.group import RankGroup


class Section(NamedTuple):
    """`size` consecutive elements of an axis that are divided among ranks in units of `unit` elements."""

    size: int
    unit: int = 1


Sections: TypeAlias = tuple[Section, ...]  # of one axis, each divided by itself


class Slice(NamedTuple):
    """The elements [begin, end) of one axis (0: rows, 1: columns) of a tensor that has `total` along it.

    `others`: further ranges, which follow it in the order in which the rank holds them.
    """

    axis: int
    begin: int
    end: int
    total: int
    others: tuple[tuple[int, int], ...] = ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return ((self.begin, self.end), *self.others)

    @property
    def size(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.size == self.total

    @property
    def is_empty(self) -> bool:
        """Whether other ranks hold all of the tensor, and this one nothing."""
        return self.begin == self.end

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the stored tensor, from that of the slice."""
        return (*shape[: self.axis], self.total, *shape[self.axis + 1 :])

    def scaled(self, numerator: int, denominator: int) -> Slice:
        """The same slice in other units, at whose borders it begins and ends: the bytes of blocks, or their scales."""

        def in_units(value: int) -> int:
            return value * numerator // denominator

        (begin, end), *others = ((in_units(first), in_units(last)) for first, last in self.ranges)
        return Slice(self.axis, begin, end, in_units(self.total), tuple(others))


ELSEWHERE = Slice(0, 0, 0, 0)  # all of a tensor is on other ranks, and its shape is not known here

Slices: TypeAlias = Mapping[str, Slice]  # by the name that the model has for a tensor


def share(group: RankGroup, axis: int, sections: Sections) -> Slice:
    """The slice of an axis with these sections that a member of a group holds: its share of each of them.

    Raises ValueError if a section can be neither divided nor copied evenly.
    """
    ranges: list[tuple[int, int]] = []
    offset = 0
    for size, unit in sections:
        begin, end = group.share(size, unit)
        if ranges and ranges[-1][1] == offset + begin:
            ranges[-1] = ranges[-1][0], offset + end
        else:
            ranges.append((offset + begin, offset + end))
        offset += size
    (begin, end), *others = ranges
    return Slice(axis, begin, end, offset, tuple(others))


def size_of_rank(sections: Sections, ranks: int) -> int:
    """How many elements of an axis with these sections each of `ranks` ranks holds; rounded down."""
    return sum(unit * max(1, size // unit // ranks) for size, unit in sections)


def stored_shape(shape: Sequence[int], part: Slice | None) -> tuple[int, ...]:
    """The shape that the checkpoint's tensor must have if its slice `part` (None: all of it) has `shape`."""
    return tuple(shape) if part is None else part.whole(shape)
