"""Verification of drafts: which of the tokens that were sampled at a row's positions belong to the output.

Each position is sampled from the model's own distribution, with the noise of its absolute position, as if there were no
drafts. Position j of a row has seen the drafts before it, so its token counts if all of these are what was sampled in
their place: output is the same as without drafts, for greedy and for random sampling (docs/adr/0019-drafts.md).

    fed        last   d1    d2    d3
    sampled     d1    d2    x     y       d1 and d2 are accepted; x replaces d3; y has seen d3 and does not count
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from srv.platform.transfers import Transfers


class DraftShape:
    """The number of positions of each row to sample, and the indices that follow from it, on the device.

    counts: 1 + drafts of each row. The positions of all rows are concatenated: n in total.
    """

    def __init__(self, counts: Sequence[int], transfers: Transfers) -> None:
        def on_device(values: object) -> torch.Tensor:
            return transfers.upload(torch.tensor(values))

        self.counts = tuple(counts)
        ends = list(accumulate(self.counts))
        self.begins = [end - count for end, count in zip(ends, self.counts, strict=True)]
        self.drafts = tuple(draft for count in self.counts for draft in range(count))  # before each position
        widest = max(self.counts)
        columns = [[begin + min(j, count - 1) for j in range(widest)] for begin, count in self._spans()]
        self._columns = on_device(columns)  # [rows, widest], the index of each position
        self._used = on_device([[j < count for j in range(widest)] for count in self.counts])
        self._first = on_device([draft == 0 for draft in self.drafts])
        self._draft = on_device(self.drafts)
        self._owner = on_device([row for row, count in enumerate(self.counts) for _ in range(count)])
        self._begin = on_device(self.begins)

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.begins, self.counts, strict=True))

    def accepted(self, fed: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """int64 [rows]: how many of each row's sampled tokens count, at least 1; fed and sampled: int64 [n]."""
        agrees = self._first.clone()
        agrees[1:] |= fed[1:] == sampled[:-1]
        return (agrees[self._columns] & self._used).long().cumprod(1).sum(1)

    def kept(self, accepted: torch.Tensor) -> torch.Tensor:
        """bool [n]: whether each position's sampled token counts."""
        return self._draft < accepted[self._owner]

    def last(self, accepted: torch.Tensor) -> torch.Tensor:
        """int64 [rows]: the index of each row's last accepted token."""
        return self._begin + accepted - 1

    def per_position(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows] -> [n]"""
        return rows[self._owner]

    def positions(self, first: torch.Tensor) -> torch.Tensor:
        """int64 [n]: the absolute positions, of which each row's first is given (int64 [rows])."""
        return first[self._owner] + self._draft


@dataclass(frozen=True)
class DraftRows:
    """The positions to sample in a step with drafts.

    fed: int64 [n], the token that is the model's input at each position: the last known one, then drafts.
    first: int64 [rows], the absolute position of the first token that each row samples.
    """

    shape: DraftShape
    fed: torch.Tensor
    first: torch.Tensor

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [n], the absolute position of the token to sample."""
        return self.shape.positions(self.first)
