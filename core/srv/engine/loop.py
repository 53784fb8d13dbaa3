"""The engine loop: it handles messages and plans, submits and applies steps.

    messages ──► scheduler.schedule() ──► executor.submit(plan) ──► up to `depth` steps in flight
                 scheduler.apply(plan, future.result()) ──► one Outputs message per step

A step with rows that wait for late inputs is submitted at once, and samples when the steps before it are applied and
the inputs are made from their tokens (`srv.sched.late`); only then is the next step submitted.
With `depth` 1 a step is planned after the previous one has been applied. With `depth` 2 the next step is planned and
enqueued while the current one runs; the generated tokens are the same.
The loop must not know devices, tensors or how a request is scheduled.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, replace

import msgspec

from srv.engine.agreement import Agreement
from srv.engine.grammars import Grammars
from srv.engine.inert import InertFeatures
from srv.engine.pause import PauseSwitch
from srv.engine.step_log import StepLog
from srv.engine.thinking import budget_of
from srv.errors import EngineDead
from srv.executor.protocol import Executor, StepFuture
from srv.hooks import Step
from srv.io.channel import EngineSide
from srv.io.messages import (
    Abort,
    Control,
    Controlled,
    Drain,
    Drained,
    Finish,
    FlushCache,
    Flushed,
    GetStats,
    Output,
    Outputs,
    Pause,
    SetLogLevel,
    Stats,
    ToEngine,
)
from srv.io.step_tokens import StepTokens
from srv.platform.hook_plugins import NO_HOOKS, Hooks
from srv.sched.late import LateInputMaker, LateInputs
from srv.sched.plan import NON_FINITE_CODES, Plan, Result, Way
from srv.sched.scheduler import Scheduler
from srv.types import FinishReason, RequestSpec, Vocabulary

logger = logging.getLogger(__name__)

_HELD_WAIT_S = 0.002  # how long an idle loop waits while grammars are being compiled
_IDLE_WAIT_S = 0.5  # how long an idle loop waits for a message before it checks its parent process again
_STATS_INTERVAL_S = 1.0
_PERIODIC_CALL = -1
_NO_STEP = -1  # the number of a step without rows


class EngineLoop:
    """Drives one scheduler and one executor until it has drained or its parent process has exited."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        channel: EngineSide,
        depth: int,
        late: LateInputMaker | None = None,
        hooks: Hooks = NO_HOOKS,
        inert: InertFeatures | None = None,
        grammars: Grammars | None = None,
        log: StepLog | None = None,
        crash_on_nan: bool = False,
        agreement: Agreement | None = None,
    ) -> None:
        """`agreement`: of replicas that compute each step together."""
        self._agreement = agreement
        self._scheduler = scheduler
        self._log = log
        self._crash_on_nan = crash_on_nan
        self._plan, self._submit_plan, self._apply_result = scheduler.schedule, executor.submit, scheduler.apply
        if log is not None:
            self._plan, self._submit_plan = log.timed("schedule", self._plan), log.timed("submit", self._submit_plan)
            self._apply_result = log.timed("apply", self._apply_result)
        self._executor = executor
        self._channel = channel
        self._depth = depth
        self._late = late
        self._grammars = grammars
        self._hooks = hooks
        self._inert = inert
        self._observe_step = hooks.bind("srv_step")
        self._submitted: deque[float] = deque()  # when the steps in flight were submitted; empty if no plugin observes
        self._waiting: Plan | None = None  # the latest step in flight, if it has not sampled yet
        self._in_flight: deque[tuple[Plan, StepFuture]] = deque()
        self._drain_until: float | None = None
        self._pending_flushes: list[tuple[int, int]] = []  # (call, steps that the answer may still wait for)
        self._pending_commands: list[Control] = []  # they wait for the steps in flight
        self._steps_by_way: Counter[Way] = Counter()
        self._slow: Counter[str] = Counter()
        self._overlapped = 0
        self._step_tokens = StepTokens()
        self._pause = PauseSwitch(scheduler.retract_all, channel.send)
        self._stats_due = 0.0
        self._integrity_checked = False
        self._stopped = False
        self._only_suspended = False  # nothing could be submitted, because masks are being made

    def run(self, parent_alive: Callable[[], bool]) -> None:
        """Run until drained, or until the process that started this one has exited."""
        while not self._stopped:
            self.step(_IDLE_WAIT_S)
            if not parent_alive():
                logger.warning("the API process has exited; the engine stops")
                return

    def step(self, wait_s: float) -> None:
        """One iteration: handle messages, submit, apply. Waits up to `wait_s` seconds for a message if idle."""
        idle = not self._in_flight and (self._scheduler.idle or self._pause.paused) and self._drain_until is None
        if self._held or self._only_suspended:
            wait_s = min(wait_s, _HELD_WAIT_S)
        for message in self._channel.receive(wait_s if idle or self._only_suspended else 0):
            self._handle(message)
        self._only_suspended = False
        self._add_ready()
        self._resume_suspended()
        self._advance_drain()
        self._run_commands()
        self._submit()
        if self._waiting is not None:
            self._sample(self._waiting)
        elif self._in_flight:
            self._apply()
        elif self._scheduler.suspended:
            self._only_suspended = True
        elif not self._scheduler.idle and not self._pause.paused:
            self._abort_stalled()
        else:
            self._on_idle()
        self._pause.settle(bool(self._in_flight))
        self._retry_flushes()
        self._send_stats()

    # ---- steps

    def _submit(self) -> None:
        while len(self._in_flight) < self._depth and self._waiting is None:
            plan = None if self._pause.paused or self._pending_commands else self._plan()
            submitted = plan if self._agreement is None else _together(plan, self._agreement)
            if submitted is None:
                return
            plan = plan or submitted
            self._integrity_checked = False
            if self._in_flight and plan.rows:
                self._overlapped += 1
            if self._observe_step is not None:
                self._submitted.append(time.perf_counter())
            self._in_flight.append((plan, self._submit_plan(submitted)))
            if plan.late:
                self._waiting = plan

    def _sample(self, plan: Plan) -> None:
        """Apply the steps before this one, make its late inputs while its forward pass runs, and let it sample."""
        while len(self._in_flight) > 1:
            self._apply()
        rows = self._scheduler.late_rows(plan)
        late = self._late.make(rows) if self._late is not None and rows else LateInputs()
        if late.forced:
            self._scheduler.jump(plan, late)
        self._executor.sample(plan.step, LateInputs(late.masks))  # ranks have no use for the rest
        self._waiting = None
        self._scheduler.settle(late.settled)
        self._scheduler.suspend(late.slow)
        for request, code, message in late.failed:
            self._send(self._scheduler.fail_request(request, code, message))

    def _resume_suspended(self) -> None:
        """Let the requests go on whose masks have been made apart from the loop, and have those of others made."""
        if self._scheduler.suspended:
            for row in self._scheduler.suspended_rows():
                if self._grammars is None or self._grammars.prepare(row):
                    self._scheduler.resume(row.request.id)

    def _apply(self) -> None:
        plan, future = self._in_flight.popleft()
        submitted = self._submitted.popleft() if self._submitted else 0.0
        try:
            result: Result = future.result()
        except EngineDead:
            raise
        except Exception as error:
            logger.exception("step %d failed; its %d requests end with an error", plan.step, len(plan.rows))
            if not plan.rows:
                return
            self._send(self._scheduler.fail(plan, "step_failed", f"the engine failed on this step: {error}"))
            return
        if not plan.rows:
            return  # the step was another replica's
        self._steps_by_way[result.way] += 1
        if result.slow:
            self._slow[result.slow] += 1
        self._step_tokens.add(sum([row.scheduled for row in plan.rows]))
        if self._crash_on_nan:
            _check_finite(result)
        self._send(self._apply_result(plan, result))
        if self._log is not None:
            self._log.applied()
        if self._observe_step is not None:
            self._observe_step(_step_event(plan, result, time.perf_counter() - submitted))

    def _abort_stalled(self) -> None:
        """The scheduler has requests but plans no step, which is a bug: abort the requests, so that none hangs."""
        logger.error("the scheduler plans no step although requests are waiting; they are aborted")
        self._send(self._scheduler.abort(None))

    # ---- messages

    def _handle(self, message: ToEngine) -> None:
        match message:
            case RequestSpec():
                self._add(message)
            case Vocabulary():
                if self._grammars is not None:
                    self._grammars.learn(message)
            case Abort(requests):
                self._abort(requests)
            case Finish(request):
                self._scheduler.finish(request)
                if self._grammars is not None:
                    self._grammars.forget(request)
            case FlushCache(call):
                self._flush(call, self._depth)
            case GetStats(call):
                self._channel.send(self._stats(call))
            case Control():
                self._pending_commands.append(message)
            case Pause():
                self._pause.set(message)
            case SetLogLevel(level):
                logging.getLogger().setLevel(level)
                logger.log(logging.getLevelNamesMapping()[level], "the engine logs at level %s from now on", level)
            case Drain(seconds):
                self._pause.release()
                self._drain_until = time.monotonic() + seconds

    def _add(self, spec: RequestSpec) -> None:
        if self._drain_until is not None:
            error = ("shutting_down", "the server is shutting down; send the request to another one")
            self._send([Output(spec.id, [], finish=FinishReason.ERROR, error=error)])
        elif self._late is None and (spec.grammar is not None or budget_of(spec) is not None):
            error = (
                "no_grammars",
                "this engine has no grammars, so that nothing could force what the output must have",
            )
            self._send([Output(spec.id, [], finish=FinishReason.ERROR, error=error)])
        elif self._grammars is None or self._grammars.admit(spec):
            self._schedule(spec)

    def _schedule(self, spec: RequestSpec) -> None:
        refused = self._scheduler.add(spec)
        if refused is not None:
            self._send([refused])

    @property
    def _held(self) -> int:
        """Requests that are not ready: their grammars are being compiled."""
        return 0 if self._grammars is None else self._grammars.held

    def _add_ready(self) -> None:
        """Pass on the requests whose grammars have been compiled."""
        if self._grammars is None or not self._grammars.held:
            return
        for spec, fault in self._grammars.ready():
            if fault:
                error = ("invalid_grammar", f"the grammar cannot be compiled: {fault}")
                self._send([Output(spec.id, [], finish=FinishReason.ERROR, error=error)])
            else:
                self._schedule(spec)

    def _abort(self, requests: list[str] | None) -> None:
        dropped = [] if self._grammars is None else self._grammars.drop(requests)
        self._send([Output(name, [], finish=FinishReason.ABORT) for name in dropped])
        self._send(self._scheduler.abort(requests))

    def _run_commands(self) -> None:
        """Run the commands that wait, once no step is in flight. Until then, `_submit` submits none."""
        if self._in_flight or not self._pending_commands:
            return
        pending, self._pending_commands = self._pending_commands, []
        for each in pending:
            self._channel.send(Controlled(each.call, self._executor.control(each.command)))

    def _retry_flushes(self) -> None:
        """Retry pending flushes: a request that has just ended may still have a row in flight."""
        pending, self._pending_flushes = self._pending_flushes, []
        for call, steps in pending:
            self._flush(call, steps - 1)

    def _flush(self, call: int, steps: int) -> None:
        """Flush and answer now if possible, otherwise after at most `steps` more steps."""
        if self._scheduler.flush():
            self._channel.send(Flushed(call, True))
        elif steps and self._in_flight:
            self._pending_flushes.append((call, steps))
        else:
            self._channel.send(Flushed(call, False, "requests are running; the cache can be flushed when none are"))

    def _send(self, outputs: list[Output]) -> None:
        if not outputs:
            return
        self._channel.send(Outputs(outputs))
        if self._grammars is not None:
            self._grammars.forget_ended(outputs)

    def _advance_drain(self) -> None:
        if self._drain_until is None:
            return
        if time.monotonic() >= self._drain_until and (self._held or not self._scheduler.idle):
            self._abort(None)
        if self._scheduler.idle and not self._in_flight and not self._held:
            self._drain_until = None if self._agreement else self._drain_until
            self._channel.send(Drained())
            self._stopped = self._agreement is None  # others may still need this replica

    # ---- statistics

    def _on_idle(self) -> None:
        """Check that all ranks are there, and once per idle period that every page is accounted for."""
        self._executor.check()
        if not self._integrity_checked and self._scheduler.idle:
            self._scheduler.check_integrity()
            self._integrity_checked = True
            self._stats_due = 0.0

    def _send_stats(self) -> None:
        now = time.monotonic()
        if now >= self._stats_due:
            self._stats_due = now + _STATS_INTERVAL_S
            self._channel.send(self._stats(_PERIODIC_CALL))

    def _stats(self, call: int) -> Stats:
        steps = self._steps_by_way
        scheduled = asdict(self._scheduler.stats())
        scheduled["waiting"] += self._held
        stats = Stats(
            call=call,
            replayed_steps=steps["graph"] + steps["pieces"],
            piecewise_steps=steps["pieces"],
            compiled_steps=steps["compiled"],
            eager_steps=steps["eager"],
            slow_steps=dict(self._slow),
            overlapped_steps=self._overlapped,
            hooks_switched_off=self._hooks.faults(),
            paused=self._pause.paused,
            step_tokens=list(self._step_tokens.counts),
            computed_tokens=self._step_tokens.total,
            **scheduled,
        )
        inert = {} if self._inert is None else self._inert.find(stats)
        return msgspec.structs.replace(stats, inert=inert) if inert else stats


def _together(plan: Plan | None, agreement: Agreement) -> Plan | None:
    """What to submit: the plan with the shape on which replicas have agreed, or one without rows if others have work.

    None if there is no plan and nobody has called for one.
    """
    if plan is None and not agreement.called:
        return None
    plan = plan or Plan(_NO_STEP, (), (), ())
    return replace(plan, shape=agreement.agree(plan.own_shape))


def _check_finite(result: Result) -> None:
    """Raises EngineDead if the model gave something that is not finite (`--crash-on-nan`)."""
    for row in result.rows:
        if row.error is not None and row.error[0] in NON_FINITE_CODES:
            raise EngineDead(f"step {result.step} gave {row.error[0]} in slot {row.slot}, and --crash-on-nan is set")


def _step_event(plan: Plan, result: Result, seconds: float) -> Step:
    tokens = sum(row.scheduled for row in plan.rows)
    generated = sum(len(row.tokens) for row in result.rows) + sum(len(row.jumped) for row in plan.rows)
    return Step(plan.step, len(plan.rows), tokens, generated, seconds)
