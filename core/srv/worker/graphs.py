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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from srv.dist.agreement import StepShape
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.layers.states import no_states
from srv.platform.interface import AttentionBackend, AttentionBatch, GraphKey, Graphs
from srv.platform.transfers import Transfers
from srv.sched.plan import SlowReason
from srv.worker.attention import PlannedAttention
from srv.worker.batch import Inputs
from srv.worker.slots import PageTables
from srv.worker.states import RecurrentStates
from srv.worker.ways import CapturedCounts, Computed, ForwardStep, selected


class StaticBuffers:
    """Inputs and outputs of captured steps, sized for the largest row count; smaller steps use the first rows.

    tokens, positions: int64 [rows]. pages: of each cache group, int32 [rows, columns], one column per page of the
    longest context. logits: float32 [rows, vocab]. All of them are on the device and never move.
    """

    def __init__(self, rows: int, columns: Sequence[int], vocab: int, transfers: Transfers) -> None:
        device, self._transfers = transfers.device, transfers
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.pages = [torch.zeros((rows, width), dtype=torch.int32, device=device) for width in columns]
        self.logits = torch.zeros((rows, vocab), dtype=torch.float32, device=device)
        self._widths = [0 for _ in columns]  # columns that may contain values other than 0
        # Of the last call of `fill`: (count, rows), the views of these rows, and their page tables.
        self._shape = (0, 0)
        self._row_views = self.tokens[:0], self.positions[:0]
        self._tables: list[torch.Tensor | None] = [None for _ in columns]

    def fill(self, count: int, inputs: Inputs, tables: PageTables) -> None:
        """Copy the step's inputs into the first rows, and pad to `count` rows.

        tables: the page tables on the host, with at most as many columns as `pages`. The caller must not modify them:
        the same tensor is not copied a second time.
        """
        rows = tables[0].shape[0]
        if self._shape != (count, rows):
            self._pad(count, rows)
        for group, table in enumerate(tables):
            if self._tables[group] is not table:
                self._fill_pages(group, count, table)
        tokens, positions = self._row_views
        tokens.copy_(inputs.model.tokens)
        positions.copy_(inputs.model.positions)

    def _pad(self, count: int, rows: int) -> None:
        self._row_views = self.tokens[:rows], self.positions[:rows]
        self.tokens[rows:count].zero_()
        self.positions[rows:count].zero_()
        self._shape, self._tables = (count, rows), [None for _ in self.pages]

    def _fill_pages(self, group: int, count: int, table: torch.Tensor) -> None:
        pages, (rows, width) = self.pages[group], table.shape
        if width < self._widths[group]:
            pages[:, width : self._widths[group]].zero_()
        self._transfers.update(pages[:rows, :width], table)
        if rows < count:
            pages[rows:count, :width].zero_()
        self._widths[group], self._tables[group] = width, table


class CapturedSteps:
    """A way of steps: the captured row counts of one runner."""

    def __init__(
        self,
        model: CausalLM,
        attention: Sequence[AttentionBackend],
        graphs: Graphs,
        buffers: StaticBuffers,
        rows: Sequence[int],
        *,
        padding: bool,
        states: RecurrentStates | None = None,
    ) -> None:
        """`attention`: the backend of decode steps, of each cache group.

        `rows`: ascending row counts, at most that of `buffers`. `states`: of a model with recurrent layers.
        """
        self._states = states
        self.rows = tuple(rows)
        self._keys = {count: GraphKey("decode", count) for count in rows}
        self._counts = CapturedCounts(rows, padding=padding)
        self._model = model
        self._attention = attention
        self._graphs = graphs
        self._buffers = buffers
        self._pages = {count: [pages[:count] for pages in buffers.pages] for count in self.rows}
        self._logits: dict[int, torch.Tensor] = {}

    @property
    def buffer_bytes(self) -> tuple[int, int]:
        """The bytes of the float32 logits, and of tokens, positions, page tables and slots of states."""
        buffers = self._buffers
        inputs = (buffers.tokens, buffers.positions, *buffers.pages)
        slots = 0 if self._states is None else self._states.static_bytes
        return buffers.logits.nbytes, sum(tensor.nbytes for tensor in inputs) + slots

    def capture(self) -> float:
        """Capture every row count, largest first, so that smaller graphs reuse memory; returns the seconds it took."""
        started = time.monotonic()
        with torch.inference_mode():
            for count in reversed(self.rows):
                self._logits[count] = self._capture(count)
        return time.monotonic() - started

    def _capture(self, count: int) -> torch.Tensor:
        states = no_states if self._states is None else self._states.of_captured(count)
        context = ForwardContext(PlannedAttention(self._attention, self._plan(count, ())), states)
        inputs = ModelInputs(self._buffers.tokens[:count], self._buffers.positions[:count])
        out = self._buffers.logits[:count]

        def run() -> torch.Tensor:
            return out.copy_(self._model.logits(self._model(inputs, context)))

        return self._graphs.capture(self._keys[count], run)

    def covers(self, inputs: Inputs, shape: StepShape | None = None) -> bool:
        if self._states is not None and inputs.drafts_only:
            return False  # the tokens of a row change its state one after the other
        if shape is not None:
            return shape.decodes and self._counts.cover(shape.tokens)
        return inputs.decodes_only and self._counts.cover(inputs.model.tokens.numel())

    def run(self, step: ForwardStep) -> Computed:
        inputs, tables = step.inputs, step.tables
        if inputs.drafts_only:
            inputs, tables = one_token_per_row(inputs, tables)
        rows = len(inputs.kv_lens)
        count = self._counts.next(inputs.model.tokens.numel() if step.shape is None else step.shape.tokens)
        if self._states is not None:
            self._states.fill(count, step.rows)
        self._buffers.fill(count, inputs, tables)
        self._graphs.replay(self._keys[count], self._plan(count, inputs.kv_lens, inputs.lengths))
        logits = self._logits[count]
        logits = logits if rows == count else logits[:rows]
        return Computed(None, logits if inputs.outputs is None else selected(logits, inputs.outputs), "graph")

    def why_not(self, inputs: Inputs) -> SlowReason:
        if not inputs.decodes_only:
            return ""
        most = self.rows[-1]
        return "row_count_not_captured" if inputs.model.tokens.numel() <= most else "more_rows_than_captured"

    def _plan(self, count: int, kv_lens: Sequence[int], lengths: torch.Tensor | None = None) -> list[Any]:
        """The attention metadata of each cache group for a step padded to `count` rows.

        The lengths are those of the unpadded rows.
        """
        padding = count - len(kv_lens)
        bounds = [*kv_lens, *([1] * padding)]
        if lengths is not None and padding:
            lengths = torch.cat((lengths, lengths.new_ones(padding)))
        queries = [1] * count
        return [
            backend.plan(AttentionBatch(queries, bounds, pages, count, lengths))
            for backend, pages in zip(self._attention, self._pages[count], strict=True)
        ]


def one_token_per_row(inputs: Inputs, tables: PageTables) -> tuple[Inputs, PageTables]:
    """The same step with a row for each token; tables: the page tables on the host."""
    owner = torch.arange(len(inputs.query_lens)).repeat_interleave(torch.tensor(inputs.query_lens))
    pairs = zip(inputs.query_lens, inputs.kv_lens, strict=True)
    bounds = [length for queries, kv in pairs for length in range(kv - queries + 1, kv + 1)]
    lengths = None if inputs.lengths is None else (inputs.model.positions + 1).int()
    return replace(inputs, query_lens=[1] * len(bounds), kv_lens=bounds, lengths=lengths), tuple(
        [table[owner] for table in tables]
    )
