"""Executors: where a plan is computed.

The engine loop knows `submit(plan) -> StepFuture` and nothing of what is behind it: one rank in this
process today, rank workers that receive plans later. An executor runs plans in the order submitted.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from srv.sched.plan import Plan, Result


class StepFuture(Protocol):
    """The result of a step to come."""

    def result(self) -> Result:
        """Wait for the step; raises what the step raised."""

    def done(self) -> bool: ...


class Executor(Protocol):
    def submit(self, plan: Plan) -> StepFuture: ...

    def close(self) -> None: ...


class Launched(Protocol):
    """A step whose work is enqueued on the device."""

    def collect(self) -> Result:
        """Wait for the device and bring the step's tokens to the host."""


class StepRunner(Protocol):
    """What an in-process executor runs: `srv.runner.runner.Runner`, or a fake."""

    def launch(self, plan: Plan) -> Launched: ...


class _Step:
    """Launching happens on the executor's thread; waiting for the device on the caller's."""

    def __init__(self, launched: Future[Launched]) -> None:
        self._launched = launched

    def result(self) -> Result:
        return self._launched.result().collect()

    def done(self) -> bool:
        return self._launched.done()


class InProcessExecutor:
    """The one-rank case: a thread of this process launches plans one after the other.

    A thread of its own, so that the loop can plan the next step while this one computes (operators of
    torch release the interpreter lock while they run).
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="srv-step")

    def submit(self, plan: Plan) -> StepFuture:
        return _Step(self._pool.submit(self._runner.launch, plan))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
