"""The executor for a single rank, which runs in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from srv.commands import Answer, Command
from srv.errors import InternalError
from srv.executor.protocol import Allocation, Launched, RankMemory, StepFuture, Worker, carry_out
from srv.planning.budget import Budget
from srv.sched.late import LateInputs
from srv.sched.plan import Plan, Result


class _InProcessFuture:
    """The step is launched on the executor's thread; `result` waits for the device on the caller's thread."""

    def __init__(self, launched: Future[Launched | None]) -> None:
        self._launched = launched

    def continue_with(self, pool: ThreadPoolExecutor, launch: Callable[[], Launched]) -> None:
        """The step has a second phase; if the first one failed, its error remains."""
        first = self._launched

        def second() -> Launched | None:
            first.result()
            return launch()

        self._launched = pool.submit(second)

    def result(self) -> Result:
        launched = self._launched.result()
        if launched is None:
            raise InternalError("the result of a step was asked for before it sampled")
        return launched.collect()


class InProcessExecutor:
    """Launches plans one after the other on a thread of its own.

    The loop can therefore plan the next step while the current one runs (torch operators release the interpreter
    lock). Everything before the first plan runs on the caller's thread.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="srv-step")

    def start(self) -> None:
        self.worker.load()

    def measure(self) -> list[RankMemory]:
        return [self.worker.measure()]

    def allocate(self, budget: Budget) -> list[Allocation]:
        return [self.worker.allocate(budget)]

    def submit(self, plan: Plan) -> StepFuture:
        self._latest = _InProcessFuture(self._pool.submit(self.worker.launch, plan))
        return self._latest

    def sample(self, step: int, late: LateInputs) -> None:
        self._latest.continue_with(self._pool, lambda: self.worker.sample(step, late))

    def control(self, command: Command) -> list[Answer]:
        return [self._pool.submit(carry_out, self.worker, command).result()]

    def check(self) -> None:
        """The rank ends only together with this process."""

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
