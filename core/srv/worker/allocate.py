"""Allocates what a loaded rank needs to run steps, within the memory budget: pools, backends and the ways of steps.

Owns the order in which this is allocated and measured. Must not know how weights are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from srv.executor.protocol import Allocation
from srv.io.memory_lines import ACTIVATIONS
from srv.models.base import torch_dtype
from srv.planning.budget import Budget
from srv.planning.kernel_steps import PIECES
from srv.planning.ledger import BUFFERS, CAPTURED_INPUTS, CAPTURED_LOGITS, GRAPHS, POOL, STATES
from srv.planning.steps import draft_count, rows_to_capture
from srv.platform.interface import AttentionBackend, KVBuffers
from srv.platform.pools import allocate_pool
from srv.sample.custom import CustomProcessors
from srv.sample.late_mask import LateMasks
from srv.sample.pooling import Pooler
from srv.sample.processors import LogitsProcessor
from srv.sample.sampler import Sampler
from srv.sample.state import SamplerState
from srv.sample.third_party import processors
from srv.speculative.algorithm import DraftSizes
from srv.worker.build_drafting import drafting, step_seconds
from srv.worker.calculated_scales import ScaleSteps
from srv.worker.capture import StartReport, capture_pieces, capture_steps
from srv.worker.chosen_backends import prepare_latent
from srv.worker.compiled import CompiledSteps, compile_steps
from srv.worker.expert_counts import ExpertRecorder, make_recorder
from srv.worker.graphs import CapturedSteps
from srv.worker.kernels import attention_kernels, sampling_kernels, step_kernels
from srv.worker.load import LoadedRank
from srv.worker.pieces import PiecewiseSteps
from srv.worker.pooled import finishes
from srv.worker.runner import Runner
from srv.worker.slots import Slots
from srv.worker.start import RankStart
from srv.worker.states import RecurrentStates
from srv.worker.ways import EagerSteps, StepWay


class ReadyRank(NamedTuple):
    """A rank that can run steps. `recorder`: of expert usage, if that is configured."""

    runner: Runner
    recorder: ExpertRecorder | None
    allocation: Allocation


class _Ways(NamedTuple):
    """The ways beside the eager one, None where the configuration has none, and what their making reports."""

    compiled: CompiledSteps | None
    captured: CapturedSteps | None
    pieces: PiecewiseSteps | None
    report: StartReport

    def in_order(self) -> list[StepWay]:
        ways: list[StepWay | None] = [self.compiled, self.captured, self.pieces]
        return [way for way in ways if way is not None]


def allocate(rank: LoadedRank, budget: Budget, start: RankStart) -> ReadyRank:
    spec, config, transfers = rank.spec, rank.spec.config, rank.transfers
    model, rows = spec.model, config.schedule.max_running_requests
    start.expect(budget)
    if config.weights.calculate_kv_scales:
        with start.phase("scales", ACTIVATIONS, does="running steps"):
            rank = _with_calculated_scales(rank, budget)
    with start.phase("pool", POOL):
        pools, state_pools = _pools(rank, budget)
    recorder = make_recorder(rank.model, config.experts, rank.device)
    start.ledger.measure(POOL, sum(map(_bytes, pools)))
    states = None
    if state_pools:
        states = RecurrentStates(state_pools, transfers, max(rows_to_capture(config), default=0))
        start.ledger.measure(STATES, sum(map(_bytes, state_pools)))
    max_pages = [group.pages_for(budget.max_request_tokens) for group in budget.groups]
    late = LateMasks(model.vocab_size, transfers) if spec.late_inputs else None
    with start.phase("backends", BUFFERS, does="loading kernels"), start.growth(BUFFERS):
        context = rank.context
        state = _sampler_state(rank, late)
        sampling = replace(context, max_rows=rows * (1 + draft_count(config)))
        chosen_sampler = rank.backends.construct("sampling_backend", sampling)
        attention = [rank.backends.attention(replace(context, kv=kv)) for kv in pools]
        prepare_latent(rank.model, attention)
        slots = Slots(rows, max_pages, transfers)
    if rank.communicator is not None:
        rank.communicator.barrier()  # capturing runs steps, and the ranks have to begin together
    every_step = [backend for backend, _ in attention]
    ways = _ways(rank, start, attention, max_pages, states)
    runner = Runner(
        ways.in_order(),
        EagerSteps(rank.model, every_step, transfers, states),
        Sampler(chosen_sampler, state),
        slots,
        transfers,
        drafting=drafting(config, DraftSizes(rows, budget.max_request_tokens, model.vocab_size), transfers),
        late=late,
        states=states,
        pooler=_pooler(rank),
        experts=recorder,
    )
    kernels = (
        *rank.kernels,
        *attention_kernels(spec.backends, attention, spec.latent_backends),
        *sampling_kernels(spec.backends, chosen_sampler),
        *step_kernels(ways.captured, ways.compiled, ways.pieces),
    )
    jumps = late is not None and ways.captured is not None and ways.compiled is None  # grammars may force tokens
    with start.phase("step times", ACTIVATIONS, does="running steps"):
        seconds = _step_seconds(rank, runner, ways.captured.rows if jumps and ways.captured else ())
    if recorder is not None and config.experts.enable_expert_distribution_metrics:
        recorder.measure_load()
    start.complete()
    ledger, phases = start.ledger.lines, start.phases.done
    pool_bytes = sum(map(_bytes, (*pools, *state_pools)))
    allocation = Allocation(pool_bytes, ways.report, seconds, ledger, phases, kernels, start.counts_peak)
    return ReadyRank(runner, recorder, allocation)


def _with_calculated_scales(rank: LoadedRank, budget: Budget) -> LoadedRank:
    layouts = rank.layouts.paged([group.page_size for group in budget.groups])
    steps = ScaleSteps(rank.spec.config, rank.spec.model, rank.model, layouts, rank.communicator)
    scales = steps.scales(rank.context, rank.backends, budget.max_request_tokens)
    return replace(rank, layouts=replace(rank.layouts, scales=scales))


def _pools(rank: LoadedRank, budget: Budget) -> tuple[list[KVBuffers], list[KVBuffers]]:
    """The pools of cache groups, and those of recurrent states."""
    paged = zip(rank.layouts.paged([group.page_size for group in budget.groups]), budget.groups, strict=True)
    return (
        [allocate_pool(rank.platform, layout, group.pages) for layout, group in paged],
        [allocate_pool(rank.platform, layout, budget.state_slots) for layout in rank.layouts.recurrent()],
    )


def _sampler_state(rank: LoadedRank, late: LateMasks | None) -> SamplerState:
    config, model = rank.spec.config, rank.spec.model
    extra: list[LogitsProcessor] = []
    if config.server.enable_custom_logit_processor:
        extra.append(CustomProcessors(processors(), model.vocab_size, rank.device))
    if late is not None:
        extra.append(late)
    rows, ends = config.schedule.max_running_requests, frozenset(model.end_tokens)
    return SamplerState(rows, model.vocab_size, ends, rank.transfers, extra=extra)


def _pooler(rank: LoadedRank) -> Pooler:
    dtype = torch_dtype(rank.spec.config.model.dtype)
    return Pooler(rank.transfers, finishes(rank.model, rank.dense, dtype) if rank.dense else {})


def _ways(
    rank: LoadedRank,
    start: RankStart,
    attention: Sequence[tuple[AttentionBackend, AttentionBackend]],
    max_pages: Sequence[int],
    states: RecurrentStates | None,
) -> _Ways:
    """Compile steps, and capture pieces and steps, as configured.

    attention: of each cache group, the backends of all steps and of decode-only steps; max_pages: of a request there.
    """
    config, platform, transfers, ledger = rank.spec.config, rank.platform, rank.transfers, start.ledger
    every_step, decode = [every for every, _ in attention], [backend for _, backend in attention]
    with start.phase("compile", GRAPHS, does="compiling"):
        compiled, compile_report = compile_steps(config, rank.model, every_step, transfers)
    with start.phase("capture", GRAPHS, does="compiling kernels and recording steps"):
        before, number = start.use(), rank.group.rank
        # Before the steps of few rows, which then reuse the memory of these.
        pieces, piece_report = capture_pieces(
            config, platform, rank.model, every_step, transfers=transfers, rank=number
        )
        if pieces is not None:
            start.measure_growth(PIECES, before)
            before = start.use()
        captured, capture_report = capture_steps(
            config,
            platform,
            rank.model,
            decode,
            pages=max_pages,
            vocab_size=rank.spec.model.vocab_size,
            transfers=transfers,
            rank=number,
            states=states,
        )
        if captured is not None:
            logits, inputs = captured.buffer_bytes
            ledger.measure(CAPTURED_LOGITS, logits)
            ledger.measure(CAPTURED_INPUTS, inputs)
            start.measure_growth(GRAPHS, before, logits + inputs)
    return _Ways(compiled, captured, pieces, (*compile_report, *piece_report, *capture_report))


def _step_seconds(rank: LoadedRank, runner: Runner, captured: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """`Allocation.step_seconds`. `captured`: the row counts of captured steps, if grammars may force tokens."""
    drafts, rows = draft_count(rank.spec.config), rank.spec.config.schedule.max_running_requests
    if drafts:
        return step_seconds(runner.seconds, drafts, rows)
    return step_seconds(partial(runner.seconds, repeats=3), 0, rows, captured)


def _bytes(kv: KVBuffers) -> int:
    return sum(tensor.nbytes for tensor in kv.all())
