"""Captured steps: which steps replay a captured graph, and the static buffers that the graphs read.

A step whose rows all compute one token, and score and return nothing else, is padded to the next captured row count
and replayed:

    tokens, positions, page table ──copied──► static buffers ──► attention.plan(graph=count) ──► replay ──► logits

A step with drafts is replayed as well: each of its tokens is then a row of its own, with the page table of its row and
the KV length up to itself. All tokens are written to the pool before any row attends (`AttentionBackend.forward`), so a
draft sees those before it.

Padded rows feed token 0 at position 0, have page 0 as their only page and a KV length of 1, so they write to page 0
only. The captured graph includes the output layer but not sampling. All other steps run eagerly. The platform
implements capture and replay (`srv.platform.interface.Graphs`). This module must not know plans, only their inputs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.platform.interface import AttentionBackend, AttentionBatch, Graphs
from srv.worker.attention import PlannedAttention
from srv.worker.batch import Inputs


class StaticBuffers:
    """Inputs and outputs of captured steps, sized for the largest row count; smaller steps use the first rows.

    tokens, positions: int64 [rows]. pages: int32 [rows, columns], one column per page of the longest context.
    logits: [rows, vocab] in the model's dtype. All of them are on the device and never move.
    """

    def __init__(self, rows: int, columns: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.pages = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        self.logits = torch.zeros((rows, vocab), dtype=dtype, device=device)
        self._width = 0  # columns that may contain values other than 0
        # Of the last call of `fill`: (count, rows), the views of these rows, and their page table.
        self._shape = (0, 0)
        self._row_views = self.tokens[:0], self.positions[:0]
        self._table: torch.Tensor | None = None

    def fill(self, count: int, inputs: Inputs, table: torch.Tensor) -> None:
        """Copy the step's inputs into the first rows, and pad to `count` rows.

        table: page table, int32 [rows, columns] on the host, with at most as many columns as `pages`. The caller keeps
        it alive until the step has finished and must not modify it: the same tensor is not copied a second time.
        """
        rows = table.shape[0]
        if self._shape != (count, rows):
            self._pad(count, rows)
        if self._table is not table:
            self._fill_pages(count, table)
        tokens, positions = self._row_views
        tokens.copy_(inputs.model.tokens)
        positions.copy_(inputs.model.positions)

    def _pad(self, count: int, rows: int) -> None:
        self._row_views = self.tokens[:rows], self.positions[:rows]
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
        """`attention`: the backend of decode steps. `rows`: ascending row counts, at most that of `buffers`."""
        self.rows = tuple(rows)
        self._model = model
        self._attention = attention
        self._graphs = graphs
        self._buffers = buffers
        self._padding = padding
        self._pages = {count: buffers.pages[:count] for count in self.rows}
        self._logits: dict[int, torch.Tensor] = {}

    def capture(self) -> float:
        """Capture every row count, largest first, so that smaller graphs reuse memory; returns the seconds it took."""
        started = time.monotonic()
        with torch.inference_mode():
            for count in reversed(self.rows):
                self._logits[count] = self._capture(count)
        return time.monotonic() - started

    def _capture(self, count: int) -> torch.Tensor:
        context = ForwardContext(PlannedAttention(self._attention, self._plan(count, ())))
        inputs = ModelInputs(self._buffers.tokens[:count], self._buffers.positions[:count])
        out = self._buffers.logits[:count]

        def run() -> torch.Tensor:
            return out.copy_(self._model.logits(self._model(inputs, context)))

        return self._graphs.capture(count, run)

    def count_for(self, inputs: Inputs) -> int | None:
        """The row count of the graph that can run this step; None: the step must run eagerly."""
        tokens = inputs.model.tokens.numel()
        decodes_only = tokens == len(inputs.query_lens) or inputs.drafts_only
        return None if inputs.scores or inputs.vectors or not decodes_only else self.count_of(tokens)

    def count_of(self, tokens: int) -> int | None:
        """The row count of the graph for a step of so many tokens, each a row of its own; None if there is none."""
        if tokens > self.rows[-1]:
            return None
        count = self.rows[bisect_left(self.rows, tokens)]
        return count if self._padding or count == tokens else None

    def replay(self, count: int, inputs: Inputs, table: torch.Tensor) -> torch.Tensor:
        """Enqueue the step, whose rows have one token each (`one_token_per_row`).

        Returns its logits, [tokens, vocab], valid until the next replay in device order.
        """
        self._buffers.fill(count, inputs, table)
        self._graphs.replay(count, self._plan(count, inputs.kv_lens, inputs.lengths))
        logits, rows = self._logits[count], len(inputs.kv_lens)
        return logits if rows == count else logits[:rows]

    def rehearse(self, count: int) -> None:
        """Enqueue the step of `count` rows with padding only. For use before the first step."""
        self._graphs.replay(count, self._plan(count, ()))

    def _plan(self, count: int, kv_lens: Sequence[int], lengths: torch.Tensor | None = None) -> Any:
        """The attention metadata of a step padded to `count` rows; the lengths are those of the unpadded rows."""
        padding = count - len(kv_lens)
        bounds = [*kv_lens, *([1] * padding)]
        if lengths is not None and padding:
            lengths = torch.cat((lengths, lengths.new_ones(padding)))
        return self._attention.plan(AttentionBatch([1] * count, bounds, self._pages[count], count, lengths))


def one_token_per_row(inputs: Inputs, table: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """The same step with a row for each token; table: page table on the host, int32 [rows, columns].

    The caller keeps the table that is returned alive until the step has finished (`StaticBuffers.fill`).
    """
    owner = torch.arange(len(inputs.query_lens)).repeat_interleave(torch.tensor(inputs.query_lens))
    pairs = zip(inputs.query_lens, inputs.kv_lens, strict=True)
    bounds = [length for queries, kv in pairs for length in range(kv - queries + 1, kv + 1)]
    lengths = None if inputs.lengths is None else (inputs.model.positions + 1).int()
    return replace(inputs, query_lens=[1] * len(bounds), kv_lens=bounds, lengths=lengths), table[owner]
