"""The runner's state per slot between steps: known tokens, page tables and the last sampled token.

    slot ──► tokens[slot]      host, the tokens of its Start
         ──► table[g][slot]    host, page ids of cache group g, in order; zero past the end
         ──► last[slot]        device, the last sampled token, the input at the next position

Sampled tokens go into the next step without passing through the host. Decode steps ask for the same slots again and
again, so the tensors of the last call are cached and returned again; callers must not modify them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from srv.errors import InternalError
from srv.platform.transfers import Transfers
from srv.sched.plan import Row, Start
from srv.types import PoolingParams, SamplingParams

IntArray = npt.NDArray[np.int64]
PageTables: TypeAlias = tuple[torch.Tensor, ...]  # of each cache group, int32 [rows, columns], on the host


@dataclass(frozen=True, slots=True)
class _SlotSelection:
    """How to access the last tokens of some slots: by `index`, or as a `view` if the slots are contiguous."""

    slots: tuple[int, ...]
    view: torch.Tensor
    index: torch.Tensor | None


class Slots:
    """State of `count` slots, each with at most `max_pages[g]` pages in cache group g."""

    def __init__(self, count: int, max_pages: Sequence[int], transfers: Transfers) -> None:
        self._tokens: list[IntArray | None] = [None] * count
        self._prompt_tokens = [0] * count
        self._prompt_logprobs = [0] * count
        self._listed: list[tuple[int, ...]] = [()] * count
        self.types_from: dict[int, int] = {}  # of the slots with tokens of type 1: the position of their first one
        self._tables = [np.zeros((count, width), dtype=np.int32) for width in max_pages]
        self._used = [np.zeros(count, dtype=np.int64) for _ in max_pages]
        self._transfers = transfers
        self._last = torch.zeros(count, dtype=torch.int64, device=transfers.device)
        self._last_positions: list[int] = []  # the values of `_positions`
        self._positions = self._last[:0]
        self._selection = _SlotSelection((), self._last[:0], None)
        self._table_version = 0  # changes whenever a page table changes
        self._cached_tables: list[tuple[object, torch.Tensor] | None] = [None for _ in max_pages]

    def start(self, start: Start) -> None:
        self.end(start.slot)
        self._tokens[start.slot] = np.asarray(start.tokens, dtype=np.int64)
        self._prompt_tokens[start.slot] = len(start.request.tokens)
        params = start.request.params
        self._prompt_logprobs[start.slot] = (isinstance(params, SamplingParams) and params.prompt_logprobs) or 0
        self._listed[start.slot] = params.logprob_token_ids if isinstance(params, SamplingParams) else ()
        if isinstance(params, PoolingParams) and params.types_from is not None:
            self.types_from[start.slot] = params.types_from

    def end(self, slot: int) -> None:
        self._tokens[slot] = None
        self.types_from.pop(slot, None)
        self._table_version += 1
        for table, used in zip(self._tables, self._used, strict=True):
            table[slot, : used[slot]] = 0
            used[slot] = 0

    def append_pages(self, row: Row) -> None:
        self._table_version += 1
        for group, pages in enumerate(row.new_pages):
            if pages:
                begin = self._used[group][row.slot]
                self._tables[group][row.slot, begin : begin + len(pages)] = pages
                self._used[group][row.slot] = begin + len(pages)

    def knows(self, row: Row) -> bool:
        """Whether the host knows the tokens of the row: they are of its Start, or forced."""
        tokens = self._tokens[row.slot]
        if tokens is None:
            raise InternalError(f"slot {row.slot} has a row but was never started")
        return row.computed < len(tokens) or bool(row.forced)

    def known_tokens(self, row: Row) -> IntArray | None:
        """Token ids at the row's positions, int64 [scheduled], if the host knows them from the Start or as forced.

        None: the row computes one position, whose token is the last sampled one. Raises InternalError if the row
        would need both known and sampled tokens.
        """
        tokens = self._tokens[row.slot]
        if tokens is None:
            raise InternalError(f"slot {row.slot} has a row but was never started")
        end = row.computed + row.scheduled
        if end <= len(tokens):
            return tokens[row.computed : end]
        if row.forced:
            return np.asarray(row.forced, dtype=np.int64)
        if row.scheduled != 1:
            raise InternalError(
                f"slot {row.slot} has a row of positions {row.computed}..{end - 1}, but only {len(tokens)} known tokens"
            )
        return None

    def all_decode(self, rows: Sequence[Row]) -> bool:
        """Whether every row computes one position, whose token is the last one that its slot sampled."""
        for row in rows:
            tokens = self._tokens[row.slot]
            if tokens is None or row.scheduled != 1 or row.computed < len(tokens):
                return False
        return True

    def score_targets(self, row: Row) -> IntArray:
        """The prompt tokens after the row's scored positions, int64 [at most `row.score`]."""
        tokens = self._tokens[row.slot]
        assert tokens is not None
        end = row.computed + row.scheduled
        return tokens[end - row.score + 1 : min(end + 1, self._prompt_tokens[row.slot])]

    def prompt_logprobs(self, slot: int) -> int:
        """The number of top alternatives to report for each scored prompt token of the slot."""
        return self._prompt_logprobs[slot]

    def listed(self, slot: int) -> tuple[int, ...]:
        """The tokens whose log-probabilities to report for each scored prompt token of the slot."""
        return self._listed[slot]

    def token_types(self, rows: Sequence[Row]) -> IntArray:
        """The types of the rows' tokens, concatenated, int64 [tokens]."""
        ends = [row.computed + row.scheduled for row in rows]
        begins = [self.types_from.get(row.slot, end) for row, end in zip(rows, ends, strict=True)]
        types = [np.arange(row.computed, end) >= begin for row, end, begin in zip(rows, ends, begins, strict=True)]
        return np.concatenate(types).astype(np.int64)

    def page_tables(self, slots: tuple[int, ...]) -> PageTables:
        """The slots' page tables of each cache group."""
        return tuple([self._page_table(group, slots) for group in range(len(self._tables))])

    def blank_tables(self, rows: int, positions: int) -> PageTables:
        """Page tables of zeros, which are page 0, for `rows` rows that compute so many positions each."""
        widths = [min(table.shape[1], positions) for table in self._tables]
        return tuple([torch.zeros((rows, width), dtype=torch.int32) for width in widths])

    def _page_table(self, group: int, slots: tuple[int, ...]) -> torch.Tensor:
        """The slots' page tables, int32 [len(slots), columns] on the host; `columns` is the longest table's length.

        Returns the tensor of the last call if nothing has changed since; otherwise a new one.
        """
        key, cached = (slots, self._table_version), self._cached_tables[group]
        if cached is not None and cached[0] == key:
            return cached[1]
        index = np.asarray(slots)
        width = int(self._used[group][index].max())
        table = torch.from_numpy(self._tables[group][index, :width])
        self._cached_tables[group] = key, table
        return table

    def last_tokens(self, slots: tuple[int, ...]) -> torch.Tensor:
        """The last sampled token of each slot, int64 [len(slots)] on the device; valid until `store_last_tokens`."""
        selection = self._select(slots)
        return selection.view if selection.index is None else self._last.index_select(0, selection.index)

    def positions(self, values: list[int]) -> torch.Tensor:
        """`values` as int64 on the device, valid until the next call.

        If every position is the previous one plus one, as in consecutive decode steps, the tensor on the device is
        incremented and nothing is copied.
        """
        if [value + 1 for value in self._last_positions] == values:
            self._positions.add_(1)
        else:
            self._positions = self._transfers.upload_integers(values)
        self._last_positions = values
        return self._positions

    def store_last_tokens(self, slots: tuple[int, ...], tokens: torch.Tensor) -> None:
        """Store the tokens just sampled, int64 [len(slots)] on the device, as the slots' last tokens."""
        selection = self._select(slots)
        if selection.index is None:
            selection.view.copy_(tokens)
        else:
            self._last.index_copy_(0, selection.index, tokens)

    def _select(self, slots: tuple[int, ...]) -> _SlotSelection:
        if self._selection.slots != slots:
            first, count = slots[0], len(slots)
            index = None
            if slots != tuple(range(first, first + count)):
                index = self._transfers.upload_integers(slots)
            self._selection = _SlotSelection(slots, self._last[first : first + count], index)
        return self._selection
