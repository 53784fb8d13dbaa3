"""The executor for a single rank, which runs in this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from srv.executor.protocol import Allocation, Launched, RankMemory, StepFuture, Worker
from srv.planning.budget import Budget
from srv.sched.plan import Plan, Result


class _InProcessFuture:
    """The step is launched on the executor's thread; `result` waits for the device on the caller's thread."""

    def __init__(self, launched: Future[Launched]) -> None:
        self._launched = launched

    def result(self) -> Result:
        return self._launched.result().collect()


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
        return _InProcessFuture(self._pool.submit(self.worker.launch, plan))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
