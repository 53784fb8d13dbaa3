"""Which keys a query sees, by the window and the chunk of its layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """Which keys a query sees: those of its window, and of its chunk, as in `AttentionLayer`; None for all."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The position of the first key that a query at `position` sees."""
        begin = 0 if self.window is None else max(0, position + 1 - self.window)
        return begin if self.chunk is None else max(begin, position // self.chunk * self.chunk)

    def hides(self, keys: Tensor, queries: Tensor) -> Tensor:
        """bool: which keys before a query are hidden from it. `keys`, `queries`: positions, which are broadcast."""
        hidden = torch.zeros((), dtype=torch.bool)
        if self.window is not None:
            hidden = hidden | (keys <= queries - self.window)
        return hidden if self.chunk is None else hidden | (keys < queries // self.chunk * self.chunk)

    def visible(self, length: int) -> int:
        """The number of keys that the last of `length` tokens sees."""
        return length - self.first(length - 1)


ALL = Reach()
