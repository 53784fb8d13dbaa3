"""What the runner remembers of each slot between steps: tokens on the host, page tables, the last token.

    slot ──► tokens[slot]      host, the tokens that a Start brought
         ──► table[g][slot]    host, page ids of cache group g, in order; zero past the end
         ──► last[slot]        device, the token sampled last, fed at the next position

Sampled tokens never pass through the host on their way into the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from srv.errors import InternalError
from srv.sched.plan import Row, Start

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]


class Slots:
    """Slot state for `count` slots of at most `max_pages[g]` pages in each cache group."""

    def __init__(self, count: int, max_pages: Sequence[int], device: torch.device) -> None:
        self._tokens: list[Ints | None] = [None] * count
        self._prompt_tokens = [0] * count
        self._prompt_logprobs = [0] * count
        self._tables = [np.zeros((count, width), dtype=np.int32) for width in max_pages]
        self._used = [np.zeros(count, dtype=np.int64) for _ in max_pages]
        self._last = torch.zeros(count, dtype=torch.int64, device=device)

    def start(self, start: Start) -> None:
        self.end(start.slot)
        self._tokens[start.slot] = np.asarray(start.tokens, dtype=np.int64)
        self._prompt_tokens[start.slot] = start.prompt_tokens
        self._prompt_logprobs[start.slot] = start.params.prompt_logprobs or 0

    def end(self, slot: int) -> None:
        self._tokens[slot] = None
        for table, used in zip(self._tables, self._used, strict=True):
            table[slot, : used[slot]] = 0
            used[slot] = 0

    def append_pages(self, row: Row) -> None:
        for group, pages in enumerate(row.new_pages):
            if pages:
                begin = self._used[group][row.slot]
                self._tables[group][row.slot, begin : begin + len(pages)] = pages
                self._used[group][row.slot] = begin + len(pages)

    def known(self, row: Row) -> Ints | None:
        """Token ids of the row's positions, int64 [scheduled], if the host knows them.

        None: the row feeds the one token that was sampled last. InternalError: it would feed some of each.
        """
        tokens = self._tokens[row.slot]
        if tokens is None:
            raise InternalError(f"slot {row.slot} is planned but was never started")
        end = row.computed + row.scheduled
        if end <= len(tokens):
            return tokens[row.computed : end]
        if row.scheduled != 1:
            raise InternalError(f"slot {row.slot} plans positions {row.computed}..{end} of {len(tokens)} known tokens")
        return None

    def targets(self, row: Row) -> Ints:
        """Prompt tokens that follow the row's scored positions, int64 [<= score]."""
        tokens = self._tokens[row.slot]
        assert tokens is not None
        end = row.computed + row.scheduled
        return tokens[end - row.score + 1 : min(end + 1, self._prompt_tokens[row.slot])]

    def prompt_logprobs(self, slot: int) -> int:
        """How many alternatives each scored prompt token of the slot is reported with."""
        return self._prompt_logprobs[slot]

    def page_table(self, group: int, slots: Sequence[int]) -> Table:
        """int32 [len(slots), columns]: the slots' pages, as wide as the longest of them."""
        index = np.asarray(slots)
        width = int(self._used[group][index].max())
        return self._tables[group][index, :width]

    def last(self, slots: torch.Tensor) -> torch.Tensor:
        return self._last[slots]

    def remember(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """The tokens just sampled, int64 [rows] on the device, become the slots' last ones."""
        self._last[slots] = tokens
