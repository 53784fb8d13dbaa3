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
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from srv.dist.agreement import StepShape
from srv.errors import InternalError
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
from srv.worker.batch import Inputs
from srv.worker.drafting import Drafting, sample_rows
from srv.worker.expert_counts import ExpertRecorder
from srv.worker.slots import Slots
from srv.worker.states import RecurrentStates
from srv.worker.ways import Computed, EagerSteps, ForwardStep, StepWay, rehearsal


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
    """A step whose forward pass is enqueued. slow: as that of `Result`."""

    plan: Plan
    inputs: Inputs
    computed: Computed
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
        ways: Sequence[StepWay],
        eager: EagerSteps,
        sampler: Sampler,
        slots: Slots,
        transfers: Transfers,
        drafting: Drafting | None = None,
        late: LateMasks | None = None,
        states: RecurrentStates | None = None,
        pooler: Pooler | None = None,
        experts: ExpertRecorder | None = None,
    ) -> None:
        """`ways`: the first one that covers a step runs it; if none does, `eager`.

        `states`: of a model with recurrent layers. `experts`: counts their tokens; steps are eager meanwhile.
        """
        self.ways, self.eager = tuple(ways), eager
        self._experts, self._recorded = experts, False  # whether the experts of this step are counted
        self._states = states
        self._sampler = sampler
        self._slots = slots
        self._transfers = transfers
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
            if not plan.rows:
                return self._accompany(plan)
            if self._drafting is not None and self._drafting.concerns(plan.rows):
                inputs = self._drafting.build(plan.rows, self._slots)
            else:
                inputs = batch.build(plan.rows, self._slots, self._transfers)
            tables = self._slots.page_tables(tuple([row.slot for row in plan.rows]))
            computed = self._way(inputs, plan.shape).run(ForwardStep(plan.rows, inputs, tables, plan.shape))
            if self._experts is not None and self._recorded:
                self._experts.end_step(plan.step, inputs.model.tokens.numel())
            if self._states is not None:
                self._states.save(plan.rows)
            slow = self._why_slow(inputs) if computed.way == "eager" else ""
            forwarded = _Forwarded(plan, inputs, computed, slow)
        if plan.late:
            self._waiting = forwarded
            return None
        return self._finish(forwarded)

    def _accompany(self, plan: Plan) -> LaunchedStep:
        """Compute a row that nobody reads, in a step that other replicas need. What it writes goes to page 0."""
        step = rehearsal(1, 1, self._slots.blank_tables(1, 1), self._transfers.device)._replace(shape=plan.shape)
        computed = self._way(step.inputs, plan.shape).run(step)
        inputs = replace(step.inputs, sampled=[])
        return LaunchedStep(plan, inputs, None, (), None, self._transfers.end(), computed.way)

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
        plan, inputs, (hidden, logits, way) = done.plan, done.inputs, done.computed
        with torch.inference_mode():
            sampled = self._sample(plan.rows, inputs, logits)
            scores = self._score(plan.rows, inputs, logits)
            vectors = None if hidden is None else self._pooler.pool(hidden, list(inputs.vectors.values()))
        end = self._transfers.end()
        return LaunchedStep(plan, inputs, sampled, scores, vectors, end, way, done.slow)

    def seconds(self, rows: int, tokens: int, repeats: int = 5) -> float:
        """The time of a step of so many rows of `tokens` tokens each, in the way that would run it.

        What it writes goes to page 0.
        """
        best = math.inf
        with torch.inference_mode():
            step = rehearsal(rows, tokens, self._slots.blank_tables(rows, tokens), self._transfers.device)
            way = self._way(step.inputs)
            for _ in range(repeats):
                begin = time.perf_counter()
                way.run(step)
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

    def _way(self, inputs: Inputs, shape: StepShape | None = None) -> StepWay | EagerSteps:
        """The first way that covers a step. Only eager steps count experts. `shape`: as that of `Plan`."""
        if not self._recorded:
            for way in self.ways:
                if way.covers(inputs, shape):
                    return way
        return self.eager

    def _why_slow(self, inputs: Inputs) -> SlowReason:
        """Why a step ran eagerly; see `Result.slow`."""
        if self._recorded and self.ways:
            return "experts_recorded"
        for way in self.ways:
            if reason := way.why_not(inputs):
                return reason
        return ""

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
