"""L1 to L3: ranks in processes of their own: their communicator alone, in captured steps, and in an engine.

`communicator` and `captured` control processes of `srv.testing.conformance.rank_process`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from srv.dist.group import RankGroup
from srv.executor.multi_process import MultiProcessExecutor
from srv.executor.protocol import Allocation, RankMemory
from srv.executor.spec import EngineSpec
from srv.models.base import torch_dtype
from srv.planning.budget import Budget
from srv.planning.pools import bytes_per_page
from srv.platform.capabilities import COLLECTIVES
from srv.platform.manifest import worker_environment
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.local import OUTPUT_TOKENS, EngineUnderTest, engine_under_test
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.processes import Child, ChildFailed
from srv.testing.conformance.setups import declared_dtypes
from srv.testing.engine import CheckedEngine

RANKS = 3  # of a communicator: more than one pair
PAIR = 2  # of an engine, whose heads they divide; and of a communicator, if there are no more devices
START_S = 120.0  # for starting both platforms and joining them
TIMEOUT_S = 30.0  # of operations that all ranks join, on a busy machine
LOSS_S = 2.0  # of the operation that a rank does not join
GROUP = "conformance"
PROCESS = "srv.testing.conformance.rank_process"
POOL_PADDING = 1.5  # a rank's pool may be that much larger than its share, for alignment; both shares are 2


def communicator(kit: Kit) -> str:
    """All operations between all ranks; then, in a new group of the same name, a rank that stays away."""
    count = _count_ranks(kit)
    with _rank_processes(kit, count) as ranks:
        results = ranks.perform("operations", TIMEOUT_S)
        _check_operations(results)
        ranks.perform("leave", TIMEOUT_S)
        lost = ranks.perform("lose", LOSS_S)[0]
        ranks.perform("leave", LOSS_S)
    operations = ", ".join(name for name in COLLECTIVES if name in kit.capabilities)
    done = f"{operations} in {', '.join(declared_dtypes(kit))} and integers; two groups at a time"
    return f"{count} ranks; {done}; {lost['summary']}"


def captured(kit: Kit) -> str:
    """The operations that steps have, in a captured step of all ranks."""
    if "communicator" not in kit.capabilities:
        raise NotApplicable("the plugin does not declare the capability communicator")
    count = _count_ranks(kit)
    with _rank_processes(kit, count) as ranks:
        first = ranks.perform("capture", TIMEOUT_S)[0]
        ranks.perform("leave", TIMEOUT_S)
    return f"{count} ranks; {first['summary']}"


def _count_ranks(kit: Kit) -> int:
    """As many as there are devices for. NotApplicable for one; in host memory, ranks need none of their own."""
    count = kit.device_facts.count
    if "host_memory" in kit.capabilities:
        return RANKS
    if count < PAIR:
        raise NotApplicable(f"{PAIR} ranks need a device each, and this host has {count}")
    return min(count, RANKS)


class _RankProcesses:
    """The processes of all ranks; each request goes to all of them. `folder`: for the directories of their groups."""

    def __init__(self, processes: Sequence[Child], folder: Path) -> None:
        self._processes, self._folder = processes, folder

    def perform(self, task: str, timeout_s: float) -> list[dict[str, Any]]:
        """The answers of all ranks to a request. Raises Fault if a rank has found a fault, or does not answer.

        A task that joins a group gets a new directory for it, and operations that time out after `timeout_s`.
        """
        directory = tempfile.mkdtemp(prefix=f"{task}-", dir=self._folder)
        for rank, process in enumerate(self._processes):
            group = RankGroup(GROUP, rank, len(self._processes), directory, timeout_s, START_S)
            process.send(json.dumps({"task": task, "group": asdict(group)}))
        deadline = time.monotonic() + START_S + timeout_s
        answers = []
        for rank, process in enumerate(self._processes):
            try:
                answers.append(process.answer(deadline - time.monotonic()))
            except ChildFailed as failure:
                raise Fault(f"rank {rank} of {len(self._processes)} {failure}") from failure
        faults = [(rank, answer) for rank, answer in enumerate(answers) if answer["fault"]]
        # A rank that loses another one, which stopped at a fault of its own, says nothing about the cause.
        causes = [(rank, fault) for rank, fault in faults if not fault.get("lost")] or faults
        if causes:
            raise Fault("; ".join(f"rank {rank} of {len(answers)}: {cause['fault']}" for rank, cause in causes))
        return answers


@contextmanager
def _rank_processes(kit: Kit, count: int) -> Iterator[_RankProcesses]:
    """Processes with the environment of the plugin's workers, which are killed in any case."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=kit.scratch))
    processes: list[Child] = []
    try:
        for rank in range(count):
            environment = worker_environment(kit.manifest, kit.device_facts, rank)
            processes.append(Child(kit.device_text, str(kit.scratch), environment, PROCESS, rank, count))
        yield _RankProcesses(processes, folder)
    finally:
        for process in processes:
            process.close()


def _check_operations(results: Sequence[dict[str, Any]]) -> None:
    """What no rank can check alone: equal bits, and that no rank left the barrier before all were there."""
    for index, sums in enumerate(zip(*(result["sums"] for result in results), strict=True)):
        if len(set(sums)) > 1:
            raise Fault(f"all_reduce gives the ranks different bits for {results[0]['cases'][index]}")
    early = max(result["entered"] for result in results) - min(result["left"] for result in results)
    if early > 0:
        raise Fault(f"a rank left the barrier {early:.2f} s before another one entered it")


class _RecordingExecutor(MultiProcessExecutor):
    """Keeps what its ranks have loaded and allocated."""

    memory: list[RankMemory]
    allocations: list[Allocation]

    def measure(self) -> list[RankMemory]:
        self.memory = super().measure()
        return self.memory

    def allocate(self, budget: Budget) -> list[Allocation]:
        self.allocations = super().allocate(budget)
        return self.allocations


class _RankedEngine(CheckedEngine):
    executor: _RecordingExecutor

    def make_executor(self, spec: EngineSpec) -> _RecordingExecutor:
        self.executor = _RecordingExecutor(spec)
        return self.executor


def engine(kit: Kit) -> str:
    """The small model on two ranks, with captured steps if they are declared, and the bytes that each rank holds."""
    _count_ranks(kit)
    with engine_under_test(kit, kind=_RankedEngine, disable_graphs=None, tp_size=PAIR) as tested:
        assert isinstance(tested.engine, _RankedEngine)
        memory = _check_shares(tested, tested.engine)
        prompts = tested.prompts()
        tested.check(prompts, tested.generate(prompts), f"greedy output of {PAIR} ranks")
        return f"{len(prompts)} prompts, {OUTPUT_TOKENS} tokens each, in {tested.dtype}; {memory}"


def _check_shares(tested: EngineUnderTest, engine: _RankedEngine) -> str:
    """Fault unless every rank holds its share of the weights, and of the KV pool up to padding."""
    spec, ready = engine.spec(), engine.ready
    config = spec.config
    weights = tested.reference.parameters(PAIR) * torch_dtype(tested.dtype).itemsize
    pool = sum(size * (count + 1) for size, count in zip(bytes_per_page(config, spec.model), ready.pages, strict=True))
    ranks = zip(engine.executor.memory, engine.executor.allocations, strict=True)
    for rank, (loaded, allocated) in enumerate(ranks):
        if loaded.weight_bytes != weights:
            raise Fault(f"rank {rank} holds {loaded.weight_bytes} bytes of weights; its share is {weights}")
        if not pool <= allocated.pool_bytes <= POOL_PADDING * pool:
            raise Fault(f"rank {rank} has a KV pool of {allocated.pool_bytes} bytes; its share is {pool}")
    return f"{weights} bytes of weights and {allocated.pool_bytes} of the KV pool on each rank"
