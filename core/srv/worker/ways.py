"""The ways in which the forward pass of a step can run, behind one protocol.

    compiled ──► captured ──► in pieces ──► eager        the runner takes the first that covers the step, or the last

Each way before the eager one is in a module of its own. A way must not know plans beyond the rows of one step, nor what
becomes of logits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from srv.dist.agreement import StepShape
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.layers.states import no_states
from srv.platform.interface import AttentionBackend
from srv.platform.transfers import Transfers
from srv.sched.plan import Row, SlowReason, Way
from srv.worker.attention import StepAttention
from srv.worker.batch import Inputs
from srv.worker.slots import PageTables
from srv.worker.states import RecurrentStates


class ForwardStep(NamedTuple):
    """A step to compute. `rows`: of its plan, () for a rehearsal. `tables`: the page tables on the host. `shape`: as
    that of `Plan`."""

    rows: Sequence[Row]
    inputs: Inputs
    tables: PageTables
    shape: StepShape | None = None


class Computed(NamedTuple):
    """A forward pass that is enqueued.

    hidden: of the model's dtype, [tokens, hidden] after the last norm; None if no row has vectors. logits: float32
    [outputs, vocab] at the positions `Inputs.outputs`; None if there are none. way: as in `srv.sched.plan.Result`.
    """

    hidden: Tensor | None
    logits: Tensor | None
    way: Way


class StepWay(Protocol):
    """One way to run the forward pass and the output layer of some steps, faster than eagerly."""

    def covers(self, inputs: Inputs, shape: StepShape | None = None) -> bool:
        """Whether this way can run the step. `shape`: as that of `Plan`."""
        ...

    def run(self, step: ForwardStep) -> Computed:
        """Enqueue a step that `covers` accepts. The results are valid until the next step in device order."""
        ...

    def why_not(self, inputs: Inputs) -> SlowReason:
        """Why a step ran eagerly instead of this way; "" if this way is not meant for steps of its kind."""
        ...


class CapturedCounts:
    """The numbers of rows or tokens for which something is captured, ascending.

    `padding`: whether it also runs steps of fewer rows or tokens, padded to the next number.
    """

    def __init__(self, counts: Sequence[int], *, padding: bool) -> None:
        self._all, self._padding = tuple(counts), padding

    def cover(self, number: int) -> bool:
        return number <= self._all[-1] if self._padding else number in self._all

    def next(self, number: int) -> int:
        """The count for a number that they cover."""
        return self._all[bisect_left(self._all, number)]


class EagerSteps:
    """Launches each kernel, and so can run every step. `states`: of a model with recurrent layers."""

    def __init__(
        self,
        model: CausalLM,
        attention: Sequence[AttentionBackend],
        transfers: Transfers,
        states: RecurrentStates | None = None,
    ) -> None:
        """`attention`: the backend of each cache group."""
        self._model, self._attention, self._transfers, self._states = model, attention, transfers, states

    def run(self, step: ForwardStep) -> Computed:
        attend = step_attention(self._attention, step, self._transfers)
        states = no_states if self._states is None else self._states.of_rows(step.rows, step.inputs.query_lens)
        hidden = self._model(step.inputs.model, ForwardContext(attend, states, shape=step.shape))
        return computed(self._model, step.inputs, hidden, "eager", step.shape)


def step_attention(attention: Sequence[AttentionBackend], step: ForwardStep, transfers: Transfers) -> StepAttention:
    """The attention of a step outside of graphs. `attention`: the backend of each cache group."""
    pages = [transfers.upload(table) for table in step.tables]
    return StepAttention(attention, step.inputs.query_lens, step.inputs.kv_lens, pages, step.inputs.lengths)


def computed(model: CausalLM, inputs: Inputs, hidden: Tensor, way: Way, shape: StepShape | None = None) -> Computed:
    """From the hidden states of all tokens to what a step needs of them. `shape`: as that of `Plan`."""
    outputs = hidden if inputs.outputs is None else selected(hidden, inputs.outputs)
    if outputs is None and shape is not None and shape.outputs:
        model.logits(hidden[:0], shape)  # other replicas need theirs
    logits = None if outputs is None else model.logits(outputs, shape)
    return Computed(hidden if inputs.vectors else None, logits, way)


def selected(rows: Tensor, indices: Tensor) -> Tensor | None:
    """The rows with these indices; None if there are none."""
    return rows[indices] if indices.numel() else None


def rehearsal(rows: int, tokens: int, tables: PageTables, device: torch.device) -> ForwardStep:
    """A step of so many rows of `tokens` tokens each, without requests: what it writes goes to page 0.

    tables: of zeros, with enough columns for `tokens` positions.
    """
    ids, lens = torch.zeros(rows * tokens, dtype=torch.int64, device=device), [tokens] * rows
    inputs = Inputs(ModelInputs(ids, ids), lens, lens, None, list(range(rows)), [], {}, drafts_only=tokens > 1)
    return ForwardStep((), inputs, tables)
