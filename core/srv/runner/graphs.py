"""Captured steps: which plans replay one, and the static buffers that a captured step reads.

A step whose rows all compute one token and score nothing is padded to the next captured row count and replayed:

    tokens, positions, page table ──copied──► static buffers ──► attention.plan(graph=count) ──► replay ──► logits

Padded rows feed token 0 at position 0, see page 0 alone and have a kv length of 1, so they write to page 0 only.
The output layer is part of what is captured; sampling is not. Everything else runs eager. How a device records
work is the platform's matter (`srv.platform.interface.Graphs`); plans are not known here beyond their rows' inputs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from srv.models.base import CausalLM
from srv.platform.interface import AttentionBackend, AttentionBatch, Graphs
from srv.runner.attention import PlannedAttention
from srv.runner.batch import Inputs


class StaticBuffers:
    """Inputs and output of captured steps, of the largest row count; smaller ones use the first rows.

    tokens, positions: int64 [rows]. pages: int32 [rows, columns], one column a page of the longest context.
    logits: [rows, vocab] of the model's dtype. All on the device, and at the same address for good.
    """

    def __init__(self, rows: int, columns: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.pages = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        self.logits = torch.zeros((rows, vocab), dtype=dtype, device=device)
        self._width = 0  # columns that may hold anything but 0
        self._shape = (0, 0)  # the last fill's count and rows, the places of these rows, and their table
        self._places = self.tokens[:0], self.positions[:0]
        self._table: torch.Tensor | None = None

    def fill(self, count: int, inputs: Inputs, table: torch.Tensor) -> None:
        """Make the first `count` rows those of the step, and padding.

        table: host, int32 [rows, columns <= mine], to be kept until the step is done. The table that was given last
        time must not have changed: it is not copied again.
        """
        rows = table.shape[0]
        if self._shape != (count, rows):
            self._pad(count, rows)
        if self._table is not table:
            self._fill_pages(count, table)
        tokens, positions = self._places
        tokens.copy_(inputs.tokens)
        positions.copy_(inputs.positions)

    def _pad(self, count: int, rows: int) -> None:
        self._places = self.tokens[:rows], self.positions[:rows]
        self.tokens[rows:count].zero_()
        self.positions[rows:count].zero_()
        self._shape, self._table = (count, rows), None

    def _fill_pages(self, count: int, table: torch.Tensor) -> None:
        rows, width = table.shape
        if width < self._width:
            self.pages[:, width : self._width].zero_()
        self.pages[:rows, :width].copy_(table, non_blocking=True)
        if rows < count:
            self.pages[rows:count, :width].zero_()
        self._width, self._table = width, table


class CapturedSteps:
    """The captured row counts of one runner."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        graphs: Graphs,
        buffers: StaticBuffers,
        rows: Sequence[int],
        *,
        padding: bool,
    ) -> None:
        """`attention` is the backend that decodes. `rows`: ascending, the last is no more than `buffers` hold."""
        self.rows = tuple(rows)
        self._model = model
        self._attention = attention
        self._graphs = graphs
        self._buffers = buffers
        self._padding = padding
        self._pages = {count: buffers.pages[:count] for count in self.rows}
        self._logits: dict[int, torch.Tensor] = {}

    def capture(self) -> float:
        """Capture every row count, the largest first: its memory serves the smaller ones. Gives the seconds it took."""
        began = time.monotonic()
        with torch.inference_mode():
            for count in reversed(self.rows):
                self._logits[count] = self._capture(count)
        return time.monotonic() - began

    def _capture(self, count: int) -> torch.Tensor:
        attend = PlannedAttention(self._attention, self._plan(count, ()))
        tokens, positions = self._buffers.tokens[:count], self._buffers.positions[:count]
        out = self._buffers.logits[:count]

        def run() -> torch.Tensor:
            return out.copy_(self._model.logits(self._model(tokens, positions, attend)))

        return self._graphs.capture(count, run)

    def count_for(self, inputs: Inputs) -> int | None:
        """The row count whose graph serves this step; None: it must run eager."""
        rows = len(inputs.query_lens)
        if inputs.scores or rows > self.rows[-1] or inputs.tokens.numel() != rows:
            return None
        count = self.rows[bisect_left(self.rows, rows)]
        return count if self._padding or count == rows else None

    def replay(self, count: int, inputs: Inputs, table: torch.Tensor) -> torch.Tensor:
        """Enqueue the step; its logits [rows, vocab], valid until the next replay in the order of the device's work."""
        self._buffers.fill(count, inputs, table)
        self._graphs.replay(count, self._plan(count, inputs.kv_lens))
        logits, rows = self._logits[count], len(inputs.kv_lens)
        return logits if rows == count else logits[:rows]

    def _plan(self, count: int, kv_lens: Sequence[int]) -> Any:
        """The attention metadata of a step of `count` rows, of which the first have these kv lengths."""
        lengths = [*kv_lens, *([1] * (count - len(kv_lens)))]
        return self._attention.plan(AttentionBatch([1] * count, lengths, self._pages[count], graph=count))
