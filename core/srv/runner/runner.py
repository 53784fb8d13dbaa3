"""The runner: a plan in, sampled tokens out. One per rank.

    plan ──► slots ──► inputs ──► attention.plan ──► model ──► logits of wanted rows ──► sampler ──► tokens
               ▲                                                                           │
               └─────────────── last token of each slot, kept on the device ◄──────────────┘

It schedules nothing and decides nothing; it must not know where plans come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from srv.models.base import CausalLM
from srv.platform.interface import AttentionBackend, AttentionBatch, Event, Platform
from srv.runner import batch
from srv.runner.attention import StepAttention
from srv.runner.batch import Inputs
from srv.runner.graphs import CapturedSteps
from srv.runner.slots import Slots
from srv.sample.logprobs import Scores, score
from srv.sample.processors import SampleRow
from srv.sample.sampler import DrawnToken, SampledBatch, Sampler
from srv.sched.plan import Plan, Result, Row, RowResult
from srv.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way through the device. `collect` may be called from another thread, once.

    table: the page table's host memory, kept until then as `Inputs.sources` is.
    """

    plan: Plan
    inputs: Inputs
    table: torch.Tensor
    sampled: SampledBatch | None
    scores: tuple[Scores, ...]
    event: Event
    replayed: bool

    def collect(self) -> Result:
        self.event.synchronize()
        drawn = [] if self.sampled is None else self.sampled.to_host()
        tokens = dict(zip(self.inputs.sampled, drawn, strict=True))
        scored = zip(self.inputs.scores, self.scores, strict=True)
        scores = {index: found.to_host() for (index, _), found in scored}
        rows = [_row_result(row.slot, tokens.get(index), scores.get(index)) for index, row in enumerate(self.plan.rows)]
        return Result(self.plan.step, tuple(rows), self.replayed)


def _row_result(slot: int, drawn: DrawnToken | None, scores: tuple[TokenLogprob, ...] | None) -> RowResult:
    if drawn is None:
        return RowResult(slot, scores=scores)
    if drawn.error:
        return RowResult(slot, scores=scores, error=drawn.error)
    return RowResult(slot, (drawn.token,), None if drawn.logprob is None else (drawn.logprob,), scores)


class Runner:
    """Runs plans on one device, in order, on one thread."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        sampler: Sampler,
        slots: Slots,
        platform: Platform,
        device: torch.device,
        end_tokens: frozenset[int],
        captured: CapturedSteps | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._slots = slots
        self._platform = platform
        self._device = device
        self._end_tokens = end_tokens
        self._captured = captured

    def launch(self, plan: Plan) -> LaunchedStep:
        """Enqueue one step: everything up to the sampled tokens, without waiting for the device."""
        with torch.inference_mode():
            self._take(plan)
            inputs = batch.build(plan.rows, self._slots, self._device)
            count = self._captured.count_for(inputs) if self._captured else None
            table = self._slots.page_table(0, tuple([row.slot for row in plan.rows]))
            logits = self._forward(inputs, table, count)
            sampled = self._sample(plan.rows, inputs, logits)
            scores = self._score(plan.rows, inputs, logits)
        return LaunchedStep(
            plan, inputs, table, sampled, scores, self._platform.record_event(self._device), replayed=count is not None
        )

    def _take(self, plan: Plan) -> None:
        """Bring the slots up to date with the plan's changes, before anything else in the step can fail.

        All of them, even when one cannot start: the next step may be planned already, with rows of these slots.
        """
        failures: list[Exception] = []
        for slot in plan.ends:
            self._slots.end(slot)
            self._sampler.state.end(slot)
        for start in plan.starts:
            self._slots.start(start)
            try:
                self._sampler.state.start(start.slot, start.tokens, start.prompt_tokens, start.params, self._end_tokens)
            except Exception as error:  # noqa: BLE001 - raised again below
                failures.append(error)
        for row in plan.rows:
            if any(row.new_pages):
                self._slots.append_pages(row)
        if failures:
            raise failures[0]

    def _forward(self, inputs: Inputs, table: torch.Tensor, count: int | None) -> torch.Tensor | None:
        """Logits of the wanted positions, [wanted, vocab] in the model's dtype; None if none are wanted.

        By the captured step of `count` rows, or eager if that is None. table: host, int32 [rows, columns].
        """
        if self._captured and count is not None:
            logits = self._captured.replay(count, inputs, table)
            return logits if inputs.outputs is None else _wanted(logits, inputs.outputs)
        pages = table.to(self._device, non_blocking=True)
        attend = StepAttention(self._attention, AttentionBatch(inputs.query_lens, inputs.kv_lens, pages))
        hidden = self._model(inputs.tokens, inputs.positions, attend)
        wanted = hidden if inputs.outputs is None else _wanted(hidden, inputs.outputs)
        return None if wanted is None else self._model.logits(wanted)

    def _sample(self, rows: Sequence[Row], inputs: Inputs, logits: torch.Tensor | None) -> SampledBatch | None:
        if not inputs.sampled or logits is None:
            return None
        chosen = [rows[index] for index in inputs.sampled]
        wanted = logits[: len(chosen)] if inputs.scores else logits
        drawn = self._sampler.sample(wanted, [SampleRow(row.slot, row.computed + row.scheduled) for row in chosen])
        self._slots.remember(tuple([row.slot for row in chosen]), drawn.tokens)
        return drawn

    def _score(self, rows: Sequence[Row], inputs: Inputs, logits: torch.Tensor | None) -> tuple[Scores, ...]:
        """Log-probabilities of the prompt tokens that the plan wants scored, one Scores a scored row."""
        begin = len(inputs.sampled)
        found: list[Scores] = []
        for index, targets in inputs.scores:
            assert logits is not None
            end = begin + len(targets)
            wanted = torch.from_numpy(targets).to(self._device)
            found.append(score(logits[begin:end], wanted, self._slots.prompt_logprobs(rows[index].slot)))
            begin = end
        return tuple(found)


def _wanted(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor | None:
    return rows[places] if places.numel() else None
