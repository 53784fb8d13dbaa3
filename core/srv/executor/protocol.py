"""The executor protocol: how the engine loop runs plans.

The loop calls `submit(plan) -> StepFuture` and must not know where the plan runs. An executor runs plans in the order
in which they are submitted.
"""

from __future__ import annotations

from typing import Protocol

from srv.sched.plan import Plan, Result


class StepFuture(Protocol):
    """The future result of a submitted step."""

    def result(self) -> Result:
        """Wait for the step and return its result; raises the exception of a failed step."""


class Executor(Protocol):
    def submit(self, plan: Plan) -> StepFuture: ...

    def close(self) -> None: ...


class Launched(Protocol):
    """A step whose work is enqueued on the device."""

    def collect(self) -> Result:
        """Wait for the device and copy the step's tokens to the host."""


class StepRunner(Protocol):
    """Launches steps on one device; implemented by `srv.worker.runner.Runner`."""

    def launch(self, plan: Plan) -> Launched: ...
