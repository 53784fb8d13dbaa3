"""The engine loop: plan, submit, apply; and the messages in between.

    messages ──► scheduler.schedule() ──► executor.submit(plan) ──► up to `depth` steps in flight
                 scheduler.apply(plan, future.result()) ──► Outputs, one message a step

With `depth` 1 a step is planned when the one before has been applied; with 2 the next step is planned and
enqueued while this one computes. The same three calls, and the same tokens.
The loop must not know devices, tensors or how a request is scheduled.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from srv.engine.executor import Executor, StepFuture
from srv.io.channel import EngineSide
from srv.io.messages import (
    Abort,
    Drain,
    Drained,
    Finish,
    FlushCache,
    Flushed,
    Generate,
    GetStats,
    Output,
    Outputs,
    Stats,
    ToEngine,
)
from srv.sched.plan import Plan, Result
from srv.sched.scheduler import Scheduler
from srv.types import FinishReason

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5  # how long an idle loop waits for a message before it looks at its parent again
_STATS_EVERY_S = 1.0
_PERIODIC = -1


class EngineLoop:
    """Drives one scheduler and one executor until told to drain, or until `alive()` says no."""

    def __init__(self, scheduler: Scheduler, executor: Executor, channel: EngineSide, depth: int) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._channel = channel
        self._depth = depth
        self._flying: deque[tuple[Plan, StepFuture]] = deque()
        self._drain_until: float | None = None
        self._aborted_before: int | None = None  # when the time to drain ran out: requests aborted until then
        self._flushes: list[tuple[int, int]] = []  # calls that wait for an answer, each with the steps it may wait
        self._replayed = 0
        self._eager = 0
        self._stats_due = 0.0
        self._checked = False
        self._stopped = False

    def run(self, parent_alive: Callable[[], bool]) -> None:
        """Work until drained, or until the process that started this one is gone."""
        while not self._stopped:
            self.step(_IDLE_WAIT_S)
            if not parent_alive():
                logger.warning("the API process is gone; the engine stops")
                return

    def step(self, wait_s: float) -> None:
        """One turn: hear messages (waiting only when there is nothing to do), submit, apply."""
        idle = not self._flying and self._scheduler.idle and self._drain_until is None
        for message in self._channel.receive(wait_s if idle else 0):
            self._hear(message)
        self._advance_drain()
        self._submit()
        if self._flying:
            self._apply()
        elif not self._scheduler.idle:
            self._stuck()
        else:
            self._rest()
        self._answer_flushes()
        self._report()

    # -- the three calls -------------------------------------------------------------------------------

    def _submit(self) -> None:
        while len(self._flying) < self._depth:
            plan = self._scheduler.schedule()
            if plan is None:
                return
            self._checked = False
            self._flying.append((plan, self._executor.submit(plan)))

    def _apply(self) -> None:
        plan, future = self._flying.popleft()
        try:
            result: Result = future.result()
        except Exception as error:
            logger.exception("step %d failed; its %d requests end with an error", plan.step, len(plan.rows))
            self._send(self._scheduler.fail(plan, "step_failed", f"the engine failed on this step: {error}"))
            return
        self._replayed += result.replayed
        self._eager += not result.replayed
        self._send(self._scheduler.apply(plan, result))

    def _stuck(self) -> None:
        """Requests wait, nothing runs, nothing can be planned: a bug. Say so and fail them, never hang."""
        logger.error("the scheduler plans nothing although requests wait; they are aborted")
        self._send(self._scheduler.abort(None))

    # -- messages --------------------------------------------------------------------------------------

    def _hear(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self._add(message)
            case Abort(requests):
                self._send(self._scheduler.abort(requests))
            case Finish(request):
                self._scheduler.finish(request)
            case FlushCache(call):
                self._flush(call, self._depth)
            case GetStats(call):
                self._channel.send(self._stats(call))
            case Drain(seconds):
                self._drain_until = time.monotonic() + seconds

    def _add(self, message: Generate) -> None:
        if self._drain_until is not None:
            refusal = ("shutting_down", "the server is shutting down; ask another one")
            self._send([Output(message.request, [], finish=FinishReason.ERROR, error=refusal)])
            return
        refused = self._scheduler.add(message)
        if refused is not None:
            self._send([refused])

    def _answer_flushes(self) -> None:
        """A request that has just ended may have a row in flight still: a flush waits for that, not for more."""
        waiting, self._flushes = self._flushes, []
        for call, steps in waiting:
            self._flush(call, steps - 1)

    def _flush(self, call: int, steps: int) -> None:
        """Answer now if that can be; else after at most `steps` more."""
        if self._scheduler.flush():
            self._channel.send(Flushed(call, True))
        elif steps and self._flying:
            self._flushes.append((call, steps))
        else:
            self._channel.send(Flushed(call, False, "requests are running; the cache can be flushed when none is"))

    def _send(self, outputs: list[Output]) -> None:
        if outputs:
            self._channel.send(Outputs(outputs))

    def _advance_drain(self) -> None:
        if self._drain_until is None:
            return
        if time.monotonic() >= self._drain_until and not self._scheduler.idle:
            if self._aborted_before is None:
                self._aborted_before = self._scheduler.stats().aborted
            self._send(self._scheduler.abort(None))
        if self._scheduler.idle and not self._flying:
            self._channel.send(Drained(self._aborted_in_drain()))
            self._stopped = True

    def _aborted_in_drain(self) -> int:
        """Counted when it is over: of those in flight, some may have come to their own end."""
        return 0 if self._aborted_before is None else self._scheduler.stats().aborted - self._aborted_before

    # -- reports ---------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Nothing to do: the moment to check that every page is accounted for (once a rest)."""
        if not self._checked:
            self._scheduler.check_integrity()
            self._checked = True
            self._stats_due = 0.0

    def _report(self) -> None:
        now = time.monotonic()
        if now >= self._stats_due:
            self._stats_due = now + _STATS_EVERY_S
            self._channel.send(self._stats(_PERIODIC))

    def _stats(self, call: int) -> Stats:
        steps = {"replayed_steps": self._replayed, "eager_steps": self._eager}
        return Stats(call=call, **steps, **asdict(self._scheduler.stats()))
