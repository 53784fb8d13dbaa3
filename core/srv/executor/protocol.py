"""The executor protocol: how the engine starts its ranks and runs plans on them.

    start ──► measure ──► allocate(budget) ──► submit(plan) ─► submit(plan) ─► control(command) ─► … ──► close
              smallest budget of a rank ──► scheduler

A rank computes its share of every step on one device. The engine must not know where its ranks run: an executor drives
one worker in this process, or one process per rank. It runs plans in the order in which they are submitted.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

from srv.commands import Answer, Command
from srv.io.memory_lines import MemoryLine
from srv.io.phases import Phase
from srv.planning.budget import Budget
from srv.sched.late import LateInputs
from srv.sched.plan import Plan, Result

logger = logging.getLogger(__name__)


class RankMemory(NamedTuple):
    """A rank after it has loaded its weights: their bytes as loaded, and its device's free and total bytes."""

    device: str
    free: int
    total: int
    weight_bytes: int


class Allocation(NamedTuple):
    """What a rank has allocated: the bytes of its KV pool, and pairs (quantity, explanation) about captured graphs.

    memory: the lines of the rank's memory ledger. phases: those of its start.
    step_seconds: (tokens, seconds) of decode steps, ascending in tokens, measured if there is a drafter, or if grammars
    may force tokens and steps are captured.
    kernels: what the rank has bound, by the keys of a kernel plan. counts_peak: the platform has a figure for the most
    that steps have needed (`srv.commands.ReadMemory`).
    """

    pool_bytes: int
    captured: tuple[tuple[str, str], ...]
    step_seconds: tuple[tuple[int, float], ...] = ()
    memory: tuple[MemoryLine, ...] = ()
    phases: tuple[Phase, ...] = ()
    kernels: tuple[tuple[str, str], ...] = ()
    counts_peak: bool = False


class StepFuture(Protocol):
    """The future result of a submitted step."""

    def result(self) -> Result:
        """Wait for the step and return its result; raises the exception of a failed step.

        EngineDead, of which RankLost is one kind: the engine cannot go on.
        """


class Executor(Protocol):
    """Runs all ranks of an engine. The methods are called in the order of the picture above."""

    def start(self) -> None:
        """Open the devices and load the weights, on all ranks."""

    def measure(self) -> list[RankMemory]:
        """The memory of every rank, in the order of ranks; each has loaded its weights."""

    def allocate(self, budget: Budget) -> list[Allocation]:
        """Allocate the KV pool of every rank, make the backends and capture graphs."""

    def submit(self, plan: Plan) -> StepFuture: ...

    def sample(self, step: int, late: LateInputs) -> None:
        """Let the latest submitted step sample, which waits for these late inputs (`Plan.late`)."""

    def control(self, command: Command) -> list[Answer]:
        """Let every rank carry out a command, while no step is in flight. The answers, in the order of ranks."""

    def check(self) -> None:
        """Called from time to time while no step is in flight. Raises RankLost if a rank has ended or does not answer.

        `StepFuture.result` and `control` raise it, too.
        """

    def close(self) -> None:
        """Stop all ranks. Nothing of them is left: no process, socket or shared memory."""


class Launched(Protocol):
    """A step whose work is enqueued on the device."""

    def collect(self) -> Result:
        """Wait for the device and copy the step's tokens to the host."""


class Worker(Protocol):
    """One rank; implemented by `srv.worker.rank.RankWorker`. `load`, `measure` and `allocate` are called in order."""

    def load(self) -> None:
        """Open the device and load the weights."""

    def measure(self) -> RankMemory: ...

    def allocate(self, budget: Budget) -> Allocation: ...

    def launch(self, plan: Plan) -> Launched | None:
        """Enqueue one step, without waiting for the device. Plans are launched in order, on one thread.

        Of a plan with late rows, only the forward pass, and None is returned: `sample` returns the launched step.
        """

    def sample(self, step: int, late: LateInputs) -> Launched:
        """Enqueue the rest of the last launched step, which has late rows."""

    def control(self, command: Command) -> Answer:
        """Carry out a command. Called on the thread that launches plans. What it raises becomes the answer."""

    def close(self) -> None:
        """Leave the group of ranks."""


def carry_out(worker: Worker, command: Command) -> Answer:
    """A rank's answer to a command, also if the command fails."""
    try:
        return worker.control(command)
    except Exception as error:
        logger.exception("%s failed", type(command).__name__)
        return Answer(error=f"{type(error).__name__}: {error}")
