"""The device tensors of one step's attention, computed once per step and shared by its layers.

    host     query lengths and KV lengths, uploaded in one copy each way
    device   the slot of each new token = page_table[row, t // page size] * page size + t % page size

Where lengths exist only on the device (`AttentionBatch.lengths`), positions follow from them there. The tensors of a
captured shape stay at their addresses; each step's values are copied into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from srv.platform.interface import AttentionBatch
from srv.platform.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Step:
    """One step. All tensors are on the device.

    starts: int32 [rows + 1], the tokens of row i are [starts[i], starts[i + 1]). lengths: int32 [rows], KV lengths.
    slots: int64 [tokens], where new keys and values are written. page_table: int32 [rows, columns]. query_lens,
    longest (an upper bound of the KV lengths): on the host. rows: of a captured shape, else None.
    """

    starts: Tensor
    lengths: Tensor
    slots: Tensor
    page_table: Tensor
    query_lens: Sequence[int]
    longest: int
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Tensors of a captured shape. row: int64 [rows], 0, 1, 2 ..."""

    starts: Tensor
    lengths: Tensor
    slots: Tensor
    row: Tensor


class StepPlanner:
    """Computes steps for pools of one page size."""

    def __init__(self, page_size: int, device: torch.device, transfers: Transfers) -> None:
        self._page_size = page_size
        self._device = device
        self._transfers = transfers
        self._fixed: dict[int, _Fixed] = {}

    def plan(self, batch: AttentionBatch) -> Step:
        """The step of a batch; for a captured shape, in that shape's tensors."""
        if batch.graph is not None:
            return self._captured(batch, batch.graph)
        queries = np.asarray(batch.query_lens, dtype=np.int64)
        rows, tokens = len(queries), int(queries.sum())
        starts = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(queries, out=starts[1:])
        row = np.repeat(np.arange(rows), queries)
        behind = starts[1:][row] - np.arange(tokens)  # tokens from here to the row's end
        moved = self._transfers.upload(np.stack((row, behind)))
        sizes = self._transfers.upload(np.concatenate((starts, np.asarray(batch.kv_lens))).astype(np.int32))
        lengths = sizes[rows + 1 :] if batch.lengths is None else batch.lengths
        return Step(
            sizes[: rows + 1],
            lengths,
            self.slots(batch.page_table, moved[0], lengths.index_select(0, moved[0]) - moved[1]),
            batch.page_table,
            batch.query_lens,
            max(batch.kv_lens),
        )

    def _captured(self, batch: AttentionBatch, rows: int) -> Step:
        fixed = self._fixed.get(rows)
        if fixed is None:
            row = torch.arange(rows, device=self._device)
            starts = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
            lengths = torch.ones(rows, dtype=torch.int32, device=self._device)
            fixed = self._fixed[rows] = _Fixed(starts, lengths, torch.zeros_like(row), row)
        if batch.lengths is None:
            self._transfers.update(fixed.lengths, torch.tensor(batch.kv_lens, dtype=torch.int32))
        else:
            fixed.lengths.copy_(batch.lengths)
        fixed.slots.copy_(self.slots(batch.page_table, fixed.row, fixed.lengths - 1))
        longest = batch.page_table.shape[1] * self._page_size
        return Step(fixed.starts, fixed.lengths, fixed.slots, batch.page_table, batch.query_lens, longest, rows)

    def slots(self, page_table: Tensor, row: Tensor, positions: Tensor) -> Tensor:
        """int64: the slots of token positions in rows; both have one shape."""
        pages = page_table[row, positions // self._page_size]
        return pages.long() * self._page_size + positions % self._page_size


def gather(pool: Tensor, slots: Tensor) -> Tensor:
    """The vectors of a pool [slots, ...] at `slots`, which are flattened; torch moves 8-bit floats as bytes only."""
    stored = pool.view(torch.uint8) if pool.element_size() == 1 else pool
    return stored.index_select(0, slots.flatten()).view(pool.dtype)
