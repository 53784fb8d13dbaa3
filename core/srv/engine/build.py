"""Builds an engine from an `EngineSpec`: starts its executor, computes the memory budget, makes the scheduler.

    executor.start ──► measure ──► smallest budget of a rank ──► executor.allocate
                                                            └──► scheduler

A configuration that cannot be served raises a `SrvError` whose message tells the operator what to do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from srv.args.config import Config
from srv.args.statement import amount_text
from srv.executor.in_process import InProcessExecutor
from srv.executor.multi_process import MultiProcessExecutor
from srv.executor.protocol import Allocation, Executor, RankMemory
from srv.executor.spec import EngineSpec
from srv.io.messages import Ready
from srv.planning import budget as budgets
from srv.planning.budget import Budget
from srv.planning.steps import draft_count, rows_to_capture, step_depth
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


def choose_executor(spec: EngineSpec) -> Executor:
    """One rank runs in this process, several run in one process each."""
    return _in_process(spec) if Config.from_json(spec.config).parallel.tp_size == 1 else MultiProcessExecutor(spec)


def build(
    spec: EngineSpec,
    make_executor: Callable[[EngineSpec], Executor] = choose_executor,
    late: LateInputMaker | None = None,
) -> Engine:
    """`late`: what makes the late inputs of its requests."""
    config = Config.from_json(spec.config)
    spec = msgspec.structs.replace(spec, late_inputs=late is not None)
    executor = make_executor(spec)
    try:
        return _build(spec, config, executor, late)
    except BaseException:
        executor.close()
        raise


def _in_process(spec: EngineSpec) -> Executor:
    from srv.worker.rank import RankWorker  # and so torch, which an engine whose ranks are other processes never needs

    return InProcessExecutor(RankWorker(spec))


def _build(spec: EngineSpec, config: Config, executor: Executor, late: LateInputMaker | None) -> Engine:
    started = time.monotonic()
    executor.start()
    ranks = executor.measure()
    budget = _budget(spec, config, ranks)
    allocated = executor.allocate(budget)
    depth = step_depth(config)
    limits = _limits(config, budget, depth, spec, allocated[0].step_seconds)
    return Engine(
        scheduler=Scheduler(limits, budget.groups, frozenset(spec.model.end_tokens), late.concerns if late else None),
        executor=executor,
        depth=depth,
        ready=_ready(spec, config, budget, ranks, allocated, time.monotonic() - started),
        late=late,
    )


def _budget(spec: EngineSpec, config: Config, ranks: Sequence[RankMemory]) -> Budget:
    """The budget of the rank that can hold the fewest pages; all ranks have the same pages."""
    reserved = int(spec.reserved_bytes)
    found = [
        budgets.compute(config, spec.model, free_bytes=rank.free, total_bytes=rank.total, reserved_bytes=reserved)
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
    )


def _ready(
    spec: EngineSpec,
    config: Config,
    budget: Budget,
    ranks: Sequence[RankMemory],
    allocated: Sequence[Allocation],
    seconds: float,
) -> Ready:
    explanations = [*budget.breakdown, *_rank_lines(ranks, allocated), *allocated[0].captured]
    for quantity, explanation in explanations:
        logger.info("%s: %s", quantity, explanation)
    return Ready(
        device=ranks[0].device,
        model=spec.model.name,
        pages=list(budget.pages),
        page_size=budget.page_size,
        max_request_tokens=budget.max_request_tokens,
        budget=explanations,
        graph_rows=list(rows_to_capture(config)),
        load_seconds=seconds,
    )


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
