"""What the runner remembers of each slot between steps: tokens on the host, page tables, the last token.

    slot ──► tokens[slot]      host, the tokens that a Start brought
         ──► table[g][slot]    host, page ids of cache group g, in order; zero past the end
         ──► last[slot]        device, the token sampled last, fed at the next position

Sampled tokens never pass through the host on their way into the next step. What is asked of the same slots step after
step, as decoding does, is made once and given again: the same tensors, which nobody writes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from srv.errors import InternalError
from srv.sched.plan import Row, Start

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the last tokens of some slots lie: beside one another (`view`), or, if there is one, by `index`."""

    slots: tuple[int, ...]
    view: torch.Tensor
    index: torch.Tensor | None


class Slots:
    """Slot state for `count` slots of at most `max_pages[g]` pages in each cache group."""

    def __init__(self, count: int, max_pages: Sequence[int], device: torch.device) -> None:
        self._tokens: list[Ints | None] = [None] * count
        self._prompt_tokens = [0] * count
        self._prompt_logprobs = [0] * count
        self._tables = [np.zeros((count, width), dtype=np.int32) for width in max_pages]
        self._used = [np.zeros(count, dtype=np.int64) for _ in max_pages]
        self._device = device
        self._last = torch.zeros(count, dtype=torch.int64, device=device)
        self._at: list[int] = []
        self._positions = self._last[:0]
        self._place = _Place((), self._last[:0], None)
        self._changes = 0  # of page tables
        self._latest: list[tuple[object, torch.Tensor] | None] = [None for _ in max_pages]

    def start(self, start: Start) -> None:
        self.end(start.slot)
        self._tokens[start.slot] = np.asarray(start.tokens, dtype=np.int64)
        self._prompt_tokens[start.slot] = start.prompt_tokens
        self._prompt_logprobs[start.slot] = start.params.prompt_logprobs or 0

    def end(self, slot: int) -> None:
        self._tokens[slot] = None
        self._changes += 1
        for table, used in zip(self._tables, self._used, strict=True):
            table[slot, : used[slot]] = 0
            used[slot] = 0

    def append_pages(self, row: Row) -> None:
        self._changes += 1
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

    def feeds_last(self, rows: Sequence[Row]) -> bool:
        """Whether each row computes one token, which is the one that its slot sampled last."""
        for row in rows:
            tokens = self._tokens[row.slot]
            if tokens is None or row.scheduled != 1 or row.computed < len(tokens):
                return False
        return True

    def targets(self, row: Row) -> Ints:
        """Prompt tokens that follow the row's scored positions, int64 [<= score]."""
        tokens = self._tokens[row.slot]
        assert tokens is not None
        end = row.computed + row.scheduled
        return tokens[end - row.score + 1 : min(end + 1, self._prompt_tokens[row.slot])]

    def prompt_logprobs(self, slot: int) -> int:
        """How many alternatives each scored prompt token of the slot is reported with."""
        return self._prompt_logprobs[slot]

    def page_table(self, group: int, slots: tuple[int, ...]) -> torch.Tensor:
        """int32 [len(slots), columns] on the host: the slots' pages, as wide as the longest of them.

        The very tensor that was given last, if nothing has changed; so a table that changes is a new one, and a copy of
        the old one that is still on its way is left alone.
        """
        key, latest = (slots, self._changes), self._latest[group]
        if latest is not None and latest[0] == key:
            return latest[1]
        index = np.asarray(slots)
        width = int(self._used[group][index].max())
        table = torch.from_numpy(self._tables[group][index, :width])
        self._latest[group] = key, table
        return table

    def last(self, slots: tuple[int, ...]) -> torch.Tensor:
        """int64 [len(slots)] on the device: the tokens that they sampled last. Good until `remember`."""
        place = self._placed(slots)
        return place.view if place.index is None else self._last.index_select(0, place.index)

    def positions(self, places: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """These positions, int64 on the device, good until the next call; and the host memory they are copied from.

        Rows that decode are one further at every step: then nothing is copied, and one is added where they are.
        """
        if len(self._at) == len(places) and all(at + 1 == place for at, place in zip(self._at, places, strict=True)):
            self._positions.add_(1)
            sources: tuple[torch.Tensor, ...] = ()
        else:
            source = torch.tensor(places, dtype=torch.int64)
            self._positions, sources = source.to(self._device, non_blocking=True, copy=True), (source,)
        self._at = places
        return self._positions, sources

    def remember(self, slots: tuple[int, ...], tokens: torch.Tensor) -> None:
        """The tokens just sampled, int64 [len(slots)] on the device, become the slots' last ones."""
        place = self._placed(slots)
        if place.index is None:
            place.view.copy_(tokens)
        else:
            self._last.index_copy_(0, place.index, tokens)

    def _placed(self, slots: tuple[int, ...]) -> _Place:
        if self._place.slots != slots:
            first, count = slots[0], len(slots)
            index = None
            if slots != tuple(range(first, first + count)):
                index = torch.tensor(slots, dtype=torch.int64).to(self._device)
            self._place = _Place(slots, self._last[first : first + count], index)
        return self._place
