"""Builds an engine from an `EngineSpec`: starts its executor, computes the memory budget, makes the scheduler.

    executor.start ──► measure ──► smallest budget of a rank ──► executor.allocate
                                                            └──► scheduler

A configuration that cannot be served raises a `SrvError` whose message tells the operator what to do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from srv.args.config import Config
from srv.args.statement import amount_text
from srv.engine.agreement import Agreement
from srv.engine.grammars import Grammars
from srv.engine.inert import InertFeatures
from srv.engine.loop import EngineLoop
from srv.engine.step_log import StepLog
from srv.engine.thinking import ThinkingBudgets
from srv.executor.in_process import InProcessExecutor
from srv.executor.multi_process import MultiProcessExecutor
from srv.executor.protocol import Allocation, Executor, RankMemory
from srv.executor.spec import EngineSpec
from srv.grammar.registry import GRAMMAR_OFF
from srv.io.channel import EngineSide
from srv.io.messages import Ready
from srv.io.phases import Phase, Phases
from srv.models.checkpoints.deletion import delete_weights
from srv.planning import budget as budgets
from srv.planning.budget import Budget
from srv.planning.grammars import grammar_choice
from srv.planning.ledger import EXACT, line_text
from srv.planning.steps import draft_count, rows_to_capture, step_depth
from srv.platform.hook_plugins import NO_HOOKS, Hooks
from srv.sched.late import LateInputMaker
from srv.sched.limits import Limits
from srv.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """What the engine loop drives, and the message that reports the engine as ready."""

    scheduler: Scheduler
    executor: Executor
    depth: int
    ready: Ready
    late: LateInputMaker | None = None
    inert: InertFeatures | None = None
    grammars: Grammars | None = None
    log: StepLog | None = None
    crash_on_nan: bool = False

    def loop(self, channel: EngineSide, hooks: Hooks = NO_HOOKS, agreement: Agreement | None = None) -> EngineLoop:
        return EngineLoop(
            self.scheduler,
            self.executor,
            channel,
            self.depth,
            self.late,
            hooks,
            self.inert,
            self.grammars,
            self.log,
            self.crash_on_nan,
            agreement,
        )


def choose_executor(spec: EngineSpec) -> Executor:
    """One rank runs in this process, several run in one process each."""
    return _in_process(spec) if spec.config.parallel.tp_size == 1 else MultiProcessExecutor(spec)


def build(
    spec: EngineSpec,
    make_executor: Callable[[EngineSpec], Executor] = choose_executor,
    late: LateInputMaker | None = None,
    phases: Phases | None = None,
) -> Engine:
    """`late`: what makes the late inputs of its requests, instead of their grammars. `phases`: those of this process
    so far."""
    grammars = _grammars(spec) if late is None else None
    late = late or (None if grammars is None else ThinkingBudgets(grammars, spec.model.vocab_size, grammars.bytes_of))
    spec = msgspec.structs.replace(spec, late_inputs=late is not None)
    executor = make_executor(spec)
    try:
        return replace(_build(spec, executor, late, phases or Phases()), grammars=grammars)
    except BaseException:
        executor.close()
        raise


def _grammars(spec: EngineSpec) -> Grammars | None:
    """None if requests cannot have grammars."""
    backend, model = grammar_choice(spec.config, spec.model).backend, spec.model
    return None if backend == GRAMMAR_OFF else Grammars(backend, model.vocab_size, model.end_tokens)


def _in_process(spec: EngineSpec) -> Executor:
    from srv.worker.rank import RankWorker  # and so torch, which an engine whose ranks are other processes never needs

    return InProcessExecutor(RankWorker(spec))


def _build(spec: EngineSpec, executor: Executor, late: LateInputMaker | None, phases: Phases) -> Engine:
    started, config = time.monotonic(), spec.config
    executor.start()
    ranks = executor.measure()
    budget = _budget(spec, config, ranks)
    allocated = executor.allocate(budget)
    if config.weights.delete_ckpt_after_loading:
        delete_weights(Path(spec.model.path))
    if len(allocated) == 1:  # the rank runs in this process
        recorded = {"engine": [*phases.done, *allocated[0].phases]}
    else:
        recorded = {f"rank {number}": list(each.phases) for number, each in enumerate(allocated)}
        recorded = {"engine": list(phases.done), **recorded}
    depth = step_depth(config)
    limits = _limits(config, budget, depth, spec, allocated[0].step_seconds)
    snapshots = budget.state_slots - limits.max_running_requests if budget.state_slots else None
    ends, waits = frozenset(spec.model.end_tokens), late.concerns if late else None
    scheduler = Scheduler(limits, budget.groups, ends, waits, snapshots)
    return Engine(
        scheduler=scheduler,
        executor=executor,
        depth=depth,
        ready=_ready(spec, config, budget, ranks, allocated, recorded, time.monotonic() - started),
        late=late,
        inert=InertFeatures(config, frozenset(spec.user_set)),
        log=StepLog(config.observe, scheduler.stats),
        crash_on_nan=config.debug.crash_on_nan,
    )


def _budget(spec: EngineSpec, config: Config, ranks: Sequence[RankMemory]) -> Budget:
    """The budget of the rank that can hold the fewest pages; all ranks have the same pages."""
    reserved = int(sum(spec.reserved_parts.values()))
    found = [
        budgets.compute(
            config,
            spec.model,
            free_bytes=rank.free,
            total_bytes=rank.total,
            own_bytes=rank.weight_bytes,
            reserved_bytes=reserved,
        )
        for rank in ranks
    ]
    return min(found, key=lambda budget: budget.pages)


def _limits(
    config: Config, budget: Budget, depth: int, spec: EngineSpec, step_seconds: tuple[tuple[int, float], ...]
) -> Limits:
    schedule = config.schedule
    return Limits(
        max_running_requests=schedule.max_running_requests,
        max_queued_requests=schedule.max_queued_requests,
        chunked_prefill_size=schedule.chunked_prefill_size,
        max_prefill_tokens=schedule.max_prefill_tokens,
        context_length=budget.max_request_tokens,
        conservativeness=schedule.schedule_conservativeness,
        policy=schedule.schedule_policy,
        prefix_cache=not config.memory.disable_radix_cache,
        depth=depth,
        vocab_size=spec.model.vocab_size,
        drafts=draft_count(config),
        step_seconds=step_seconds,
        device_lengths=spec.kv_lengths == "device",
        save_interval=config.memory.mamba_track_interval,
    )


def _ready(
    spec: EngineSpec,
    config: Config,
    budget: Budget,
    ranks: Sequence[RankMemory],
    allocated: Sequence[Allocation],
    phases: dict[str, list[Phase]],
    seconds: float,
) -> Ready:
    explanations = [*budget.breakdown, *_rank_lines(ranks, allocated), *allocated[0].captured]
    for quantity, explanation in explanations:
        logger.debug("%s: %s", quantity, explanation)
    logger.info("%s", _memory_line(ranks, allocated, budget))
    _log_ledgers(allocated, phases)
    return Ready(
        device=ranks[0].device,
        model=spec.model.name,
        pages=list(budget.pages),
        page_size=budget.page_size,
        max_request_tokens=budget.max_request_tokens,
        budget=explanations,
        graph_rows=list(rows_to_capture(config)),
        kernels=dict(allocated[0].kernels),
        load_seconds=seconds,
        memory=[list(each.memory) for each in allocated],
        counts_peak=all(each.counts_peak for each in allocated),
        phases=phases,
    )


def _memory_line(ranks: Sequence[RankMemory], allocated: Sequence[Allocation], budget: Budget) -> str:
    """What the memory of all ranks is used for, in one line."""
    weights = amount_text(sum(rank.weight_bytes for rank in ranks), "bytes")
    pool = amount_text(sum(own.pool_bytes for own in allocated), "bytes")
    most = f"a request may have {budget.max_request_tokens} tokens, prompt and output"
    return f"memory: {weights} of weights and a KV pool of {pool}; {most}"


def _log_ledgers(allocated: Sequence[Allocation], phases: dict[str, list[Phase]]) -> None:
    """Both ledgers; lines that are off and phases that were slow are warnings, all others are for debugging."""
    for number, each in enumerate(allocated):
        for line in each.memory:
            level = logging.WARNING if line.off and line.name in EXACT else logging.DEBUG
            logger.log(level, "memory of rank %d, %s: %s", number, line.name, line_text(line))
    for process, done in phases.items():
        for phase in done:
            logger.log(logging.WARNING if phase.cause else logging.DEBUG, "start of %s, %s", process, phase)


def _rank_lines(ranks: Sequence[RankMemory], allocated: Sequence[Allocation]) -> list[tuple[str, str]]:
    """What each rank holds; [] for one rank, whose lines say it already."""
    if len(ranks) == 1:
        return []
    return [
        (
            f"rank_{number}",
            f"{amount_text(rank.weight_bytes, 'bytes')} of weights and a KV pool of"
            f" {amount_text(own.pool_bytes, 'bytes')} on {rank.device}",
        )
        for number, (rank, own) in enumerate(zip(ranks, allocated, strict=True))
    ]
