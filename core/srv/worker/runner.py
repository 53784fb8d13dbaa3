"""The model runner: executes plans and returns sampled tokens. One per rank.

    plan ──► slots ──► inputs ──► attention.plan ──► model ──► logits of selected positions ──► sampler ──► tokens
               ▲                                                                                   │
               └─────────────────── last token of each slot, kept on the device ◄──────────────────┘

It makes no scheduling decisions and must not know where plans come from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from srv.errors import InternalError
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.layers.states import StatesOf, no_states
from srv.platform.interface import AttentionBackend
from srv.platform.transfers import StepCopies, Transfers
from srv.sample.late_mask import LateMasks
from srv.sample.logprobs import Scores, listed_tokens, score
from srv.sample.pooling import NON_FINITE, Pooler, Vectors
from srv.sample.processors import SampleRow
from srv.sample.sampler import SampledBatch, SampledToken, Sampler
from srv.sched.late import LateInputs
from srv.sched.plan import Plan, Result, Row, RowResult, SlowReason, Way
from srv.types import TokenLogprob
from srv.worker import batch
from srv.worker.attention import StepAttention
from srv.worker.batch import Inputs
from srv.worker.compiled import CompiledSteps
from srv.worker.drafting import Drafting, sample_rows
from srv.worker.expert_counts import ExpertRecorder
from srv.worker.graphs import CapturedSteps, one_token_per_row
from srv.worker.pieces import PiecewiseSteps
from srv.worker.slots import PageTables, Slots
from srv.worker.states import RecurrentStates


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is enqueued on the device. `collect` is called once, possibly from another thread."""

    plan: Plan
    inputs: Inputs
    sampled: SampledBatch | None
    scores: tuple[Scores, ...]
    vectors: Vectors | None
    copies: StepCopies
    way: Way
    slow: SlowReason = ""

    def collect(self) -> Result:
        self.copies.wait()
        try:
            return self._result()
        finally:
            self.copies.release()

    def _result(self) -> Result:
        sampled: list[tuple[SampledToken, ...]] = []
        if self.sampled is not None and self.sampled.accepted is not None:
            sampled = self.sampled.accepted_to_host()
        elif self.sampled is not None:
            sampled = [(token,) for token in self.sampled.to_host()]
        tokens = dict(zip(self.inputs.sampled, sampled, strict=True))
        scored = zip(self.inputs.scores, self.scores, strict=True)
        scores = {index: each.to_host() for (index, _), each in scored}
        values = [] if self.vectors is None else self.vectors.to_host()
        vectors = dict(zip(self.inputs.vectors, values, strict=True))
        rows = [
            _row_result(row.slot, tokens.get(index, ()), scores.get(index), vectors.get(index))
            for index, row in enumerate(self.plan.rows)
        ]
        return Result(self.plan.step, tuple(rows), self.way, self.slow)


class _Forwarded(NamedTuple):
    """A step whose forward pass is enqueued. hidden, logits, way: see `Runner._forward`. slow: as that of `Result`."""

    plan: Plan
    inputs: Inputs
    hidden: torch.Tensor | None
    logits: torch.Tensor | None
    way: Way
    slow: SlowReason


def _row_result(
    slot: int, sampled: Sequence[SampledToken], scores: tuple[TokenLogprob, ...] | None, vectors: bytes | None
) -> RowResult:
    if vectors == b"":
        return RowResult(slot, error=NON_FINITE)
    for each in sampled:
        if each.error:
            return RowResult(slot, scores=scores, error=each.error)
    logprobs = tuple([each.logprob for each in sampled if each.logprob])
    return RowResult(slot, tuple([each.token for each in sampled]), logprobs or None, scores, vectors)


class Runner:
    """Runs plans on one device, in order, on one thread."""

    def __init__(
        self,
        model: CausalLM,
        attention: Sequence[AttentionBackend],
        sampler: Sampler,
        slots: Slots,
        transfers: Transfers,
        captured: CapturedSteps | None = None,
        compiled: CompiledSteps | None = None,
        drafting: Drafting | None = None,
        late: LateMasks | None = None,
        pieces: PiecewiseSteps | None = None,
        states: RecurrentStates | None = None,
        pooler: Pooler | None = None,
        experts: ExpertRecorder | None = None,
    ) -> None:
        """`states`: of a model with recurrent layers. `experts`: counts their tokens; steps are eager meanwhile."""
        self._experts, self._recorded = experts, False  # whether the experts of this step are counted
        self._states = states
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._slots = slots
        self._transfers = transfers
        self._captured = captured
        self._compiled = compiled
        self._pieces = pieces
        self._drafting = drafting
        self._late = late
        self._pooler = pooler or Pooler(transfers)
        self._waiting: _Forwarded | None = None  # the last launched step, if it waits for late inputs

    def launch(self, plan: Plan) -> LaunchedStep | None:
        """Enqueue one step, from the forward pass to the sampled tokens, without waiting for the device.

        A plan with late rows is enqueued up to its logits only, and None is returned; `sample` goes on.
        """
        self._waiting = None
        self._recorded = self._experts is not None and self._experts.counts_steps
        with torch.inference_mode():
            self._begin(plan)
            if self._drafting is not None and self._drafting.concerns(plan.rows):
                inputs = self._drafting.build(plan.rows, self._slots)
            else:
                inputs = batch.build(plan.rows, self._slots, self._transfers)
            count = self._captured_rows(inputs)
            tables = self._slots.page_tables(tuple([row.slot for row in plan.rows]))
            if count is not None and inputs.drafts_only:
                inputs, tables = one_token_per_row(inputs, tables)
            hidden, logits, way = self._forward(plan.rows, inputs, tables, count)
            if self._experts is not None and self._recorded:
                self._experts.end_step(plan.step, inputs.model.tokens.numel())
            if self._states is not None:
                self._states.save(plan.rows)
            slow = self._why_slow(inputs) if way == "eager" else ""
            forwarded = _Forwarded(plan, inputs, hidden, logits, way, slow)
        if plan.late:
            self._waiting = forwarded
            return None
        return self._finish(forwarded)

    def sample(self, step: int, late: LateInputs) -> LaunchedStep:
        """Enqueue the rest of the step that was launched last, which has late rows."""
        forwarded, self._waiting = self._waiting, None
        if forwarded is None or forwarded.plan.step != step or self._late is None:
            raise InternalError(f"late inputs came for step {step}, which does not wait for them")
        self._late.set(late)
        try:
            return self._finish(forwarded)
        finally:
            self._late.clear()

    def _finish(self, done: _Forwarded) -> LaunchedStep:
        """From the logits of a step to its results, which are being copied to the host."""
        plan, inputs, hidden = done.plan, done.inputs, done.hidden
        with torch.inference_mode():
            sampled = self._sample(plan.rows, inputs, done.logits)
            scores = self._score(plan.rows, inputs, done.logits)
            vectors = None if hidden is None else self._pooler.pool(hidden, list(inputs.vectors.values()))
        end = self._transfers.end()
        return LaunchedStep(plan, inputs, sampled, scores, vectors, end, done.way, done.slow)

    def seconds(self, rows: int, tokens: int, repeats: int = 5) -> float:
        """The time of a step of so many rows of `tokens` tokens each: replayed, compiled or eager, as it would be.

        What it writes goes to page 0.
        """
        best = math.inf
        compiled = self._compiled if self._compiled and rows * tokens <= self._compiled.rows else None
        captured = self._captured.count_of(rows * tokens) if self._captured and not compiled else None
        with torch.inference_mode():
            ids = torch.zeros(rows * tokens, dtype=torch.int64, device=self._transfers.device)
            pages = torch.zeros((rows, tokens), dtype=torch.int32, device=self._transfers.device)
            for _ in range(repeats):
                begin = time.perf_counter()
                if self._captured and captured is not None:
                    self._captured.rehearse(captured)
                else:
                    lens = [tokens] * rows
                    attend = StepAttention(self._attention, lens, lens, [pages] * len(self._attention))
                    if compiled is not None:
                        compiled.run(ModelInputs(ids, ids), attend)
                    else:
                        hidden, _ = self._hidden(ModelInputs(ids, ids), attend)
                        self._model.logits(hidden)
                self._transfers.streams.compute.record().synchronize()
                best = min(best, time.perf_counter() - begin)
        return best

    def _begin(self, plan: Plan) -> None:
        """Begin the step's copies, and apply the plan's changes to the slots before any other part of it can fail.

        Whatever fails here, all slots are still updated, because the next plan may already contain rows for them.
        """
        failures: list[Exception] = []
        try:
            self._transfers.begin()
        except Exception as error:  # noqa: BLE001 - raised again below
            failures.append(error)
        for slot in plan.ends:
            self._slots.end(slot)
            self._sampler.state.end(slot)
            self._pooler.end(slot)
        for start in plan.starts:
            self._slots.start(start)
            self._pooler.start(start)
            try:
                if self._states is not None:
                    self._states.start(start)
                self._sampler.state.start(start)
                if self._drafting is not None:
                    self._drafting.start(start)
            except Exception as error:  # noqa: BLE001 - raised again below
                failures.append(error)
        for row in plan.rows:
            if any(row.new_pages):
                self._slots.append_pages(row)
        if failures:
            raise failures[0]

    def _captured_rows(self, inputs: Inputs) -> int | None:
        """The row count of the graph that runs this step; None if it is compiled, or runs eagerly."""
        if self._captured is None or self._recorded or (self._compiled is not None and self._compiled.covers(inputs)):
            return None
        if self._states is not None and inputs.drafts_only:
            return None  # the tokens of a row change its state one after the other
        return self._captured.count_for(inputs)

    def _forward(
        self, rows: Sequence[Row], inputs: Inputs, tables: PageTables, count: int | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Way]:
        """Hidden states of the model's dtype, float32 logits, and how they were computed.

        hidden: [tokens, hidden] after the last norm; None if no row has vectors. logits: [outputs, vocab] at the
        positions `inputs.outputs`; None if there are none. Replays the graph captured for `count` rows; if `count` is
        None, runs the compiled function, replays pieces, or runs eagerly. tables: the page tables on the host.
        """
        if self._captured and count is not None:
            if self._states is not None:
                self._states.fill(count, rows)
            replayed = self._captured.replay(count, inputs, tables)
            return None, replayed if inputs.outputs is None else _select(replayed, inputs.outputs), "graph"
        pages = [self._transfers.upload(table) for table in tables]
        attend = StepAttention(self._attention, inputs.query_lens, inputs.kv_lens, pages, inputs.lengths)
        if self._compiled is not None and not self._recorded and self._compiled.covers(inputs):
            computed = self._compiled.run(inputs.model, attend)
            way: Way = "eager" if self._compiled.ran_uncompiled else "compiled"
            return None, computed if inputs.outputs is None else _select(computed, inputs.outputs), way
        states = no_states if self._states is None else self._states.of_rows(rows, inputs.query_lens)
        hidden, in_pieces = self._hidden(inputs.model, attend, states)
        selected = hidden if inputs.outputs is None else _select(hidden, inputs.outputs)
        logits = None if selected is None else self._model.logits(selected)
        if in_pieces and inputs.vectors:
            hidden = hidden.clone()  # copies to the host may read it when the next step has begun
        return hidden if inputs.vectors else None, logits, "pieces" if in_pieces else "eager"

    def _why_slow(self, inputs: Inputs) -> SlowReason:
        """Why an eager step that has been enqueued was neither captured nor compiled; see `Result.slow`."""
        if self._recorded and (self._captured or self._compiled or self._pieces):
            return "experts_recorded"
        if self._compiled is not None and self._compiled.covers(inputs):
            return "not_compiled_for"
        tokens = inputs.model.tokens.numel()
        if inputs.decodes_only and self._captured is not None:
            return "row_count_not_captured" if tokens <= self._captured.rows[-1] else "more_rows_than_captured"
        if inputs.decodes_only and self._compiled is not None:
            return "more_rows_than_compiled"
        if self._pieces is None:
            return ""
        return "token_count_not_captured" if tokens <= self._pieces.counts[-1] else "more_tokens_than_captured"

    def _hidden(
        self, inputs: ModelInputs, attend: StepAttention, states: StatesOf = no_states
    ) -> tuple[torch.Tensor, bool]:
        """Hidden states of all tokens, and whether they come from replayed pieces; else, they are computed eagerly."""
        count = None if self._pieces is None or self._recorded else self._pieces.count_for(inputs.tokens.numel())
        if self._pieces is None or count is None:
            return self._model(inputs, ForwardContext(attend, states)), False
        return self._pieces.replay(count, inputs, attend), True

    def _sample(self, rows: Sequence[Row], inputs: Inputs, logits: torch.Tensor | None) -> SampledBatch | None:
        if not inputs.sampled or logits is None:
            return None
        sampling = [rows[index] for index in inputs.sampled]
        slots = tuple([row.slot for row in sampling])
        if any(row.forced for row in sampling):
            self._count_jumped(sampling)
        if inputs.drafts is not None:
            positions = sample_rows(sampling)
            sampled = self._sampler.sample_drafts(logits[: len(positions)], positions, inputs.drafts)
        else:
            positions = [SampleRow(row.slot, row.computed + row.scheduled) for row in sampling]
            sampled = self._sampler.sample(logits[: len(positions)] if inputs.scores else logits, positions)
        last = sampled.tokens
        if self._drafting is not None:
            last = self._drafting.append(slots, sampled, inputs.drafts)
        self._slots.store_last_tokens(slots, last)
        return sampled

    def _count_jumped(self, rows: Sequence[Row]) -> None:
        """Count the tokens that these rows have jumped as output, as if they had been sampled."""
        jumped = [(row.slot, token) for row in rows for token in row.jumped]
        tokens = self._transfers.upload_integers([token for _, token in jumped])
        self._sampler.state.observe_kept([slot for slot, _ in jumped], tokens, torch.ones_like(tokens).bool())

    def _score(self, rows: Sequence[Row], inputs: Inputs, logits: torch.Tensor | None) -> tuple[Scores, ...]:
        """Log-probabilities of prompt tokens, one Scores for each entry of `inputs.scores`."""
        begin = sum([rows[index].sample for index in inputs.sampled])
        scores: list[Scores] = []
        for index, targets in inputs.scores:
            assert logits is not None
            end = begin + len(targets)
            slot, target_tokens = rows[index].slot, self._transfers.upload(targets)
            listed = listed_tokens([self._slots.listed(slot)] * len(targets), self._transfers)
            top = self._slots.prompt_logprobs(slot)
            scores.append(score(logits[begin:end], target_tokens, self._transfers, top, listed))
            begin = end
        return tuple(scores)


def _select(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor | None:
    return rows[indices] if indices.numel() else None
