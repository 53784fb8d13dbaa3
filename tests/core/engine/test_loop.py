"""The engine loop with a fake executor: failing steps, drain, flush, statistics, and a parent that is gone."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import pytest
from sched_driver import END, limits, message

from srv.commands import Answer, Command, StopProfile
from srv.engine.loop import EngineLoop
from srv.errors import IntegrityError
from srv.executor.in_process import InProcessExecutor
from srv.executor.protocol import Launched
from srv.io.channel import InProcessChannel
from srv.io.messages import (
    Abort,
    Control,
    Controlled,
    Drain,
    Drained,
    FlushCache,
    Flushed,
    FromEngine,
    GetStats,
    Output,
    Outputs,
    Stats,
    ToEngine,
)
from srv.io.step_tokens import BOUNDS
from srv.memory.groups import PageGroup
from srv.sched.plan import Plan, Result
from srv.sched.scheduler import Limits, Scheduler
from srv.testing.fake_executor import FakeExecutor, expected_tokens
from srv.types import FinishReason, Grammar

PAGES = 64
GROUPS = [PageGroup(PAGES, 4)]
A, B, C = ([number, 7, 8, 9, 10] for number in (1, 2, 3))


@dataclass
class Broken:
    """A launched step that fails when its result is collected."""

    error: Exception

    def collect(self) -> Result:
        raise self.error


@dataclass
class Done:
    result: Future[Result]

    def collect(self) -> Result:
        return self.result.result()


class FakeRunner:
    """The fake executor as a runner in the real executor's thread. The steps in `launch_errors` raise at the launch."""

    def __init__(self, fake: FakeExecutor, launch_errors: frozenset[int] = frozenset()) -> None:
        self._fake, self._launch_errors = fake, launch_errors
        self.launched = 0

    def launch(self, plan: Plan) -> Launched:
        self.launched += 1
        future = self._fake.submit(plan)
        error = future.exception()
        if error is None:
            return Done(future)
        assert isinstance(error, Exception)
        if plan.step in self._launch_errors:
            raise error
        return Broken(error)

    def control(self, command: Command) -> Answer:
        return Answer([f"{type(command).__name__} after {self.launched} steps"])


class NeverPlans(Scheduler):
    """A scheduler with a bug: it never schedules a step."""

    def schedule(self) -> Plan | None:
        return None


class LosesCount(Scheduler):
    """A scheduler whose integrity check fails after the first finished request."""

    def check_integrity(self, deep: bool = False) -> None:
        if self.stats().finished:
            raise IntegrityError("a page was lost")


class Harness:
    """A loop with its messages: `received` in order, `outputs` by request. The steps in `broken` raise."""

    def __init__(
        self,
        depth: int,
        broken: frozenset[int] = frozenset(),
        while_launching: bool = False,
        scheduler: type[Scheduler] = Scheduler,
        **given: object,
    ) -> None:
        bounds: Limits = limits(depth=depth, **given)
        self.scheduler = scheduler(bounds, GROUPS, frozenset({END}))
        fake = FakeExecutor(GROUPS, step_error=lambda step: step in broken)
        self.executor = InProcessExecutor(FakeRunner(fake, broken if while_launching else frozenset()))
        self._channel = InProcessChannel()
        self.loop = EngineLoop(self.scheduler, self.executor, self._channel, depth)
        self.received: list[FromEngine] = []
        self.outputs: dict[str, list[Output]] = defaultdict(list)

    def send(self, *messages: ToEngine) -> None:
        for one in messages:
            self._channel.put(one)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.step(0)
            self.scheduler.check_integrity(deep=True)
            self._gather()

    def run(self, parent_alive: Callable[[], bool] = lambda: True) -> None:
        self.loop.run(parent_alive)
        self._gather()

    def until_idle(self) -> None:
        for _ in range(500):
            self.step()
            if self.scheduler.idle:
                return
        raise AssertionError("the requests did not end within 500 steps")

    def tokens(self, request: str) -> list[int]:
        return [token for output in self.outputs[request] for token in output.tokens]

    def last(self, request: str) -> Output:
        return self.outputs[request][-1]

    def _gather(self) -> None:
        while True:
            try:
                received = self._channel.take(0)
            except queue.Empty:
                return
            self.received.append(received)
            if isinstance(received, Outputs):
                for output in received.outputs:
                    self.outputs[output.request].append(output)

    def of_kind(self, kind: type) -> list[FromEngine]:
        return [each for each in self.received if isinstance(each, kind)]


@pytest.fixture(params=[1, 2], ids=["depth-1", "depth-2"])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# ---- steps


def test_requests_are_served_and_each_ends_once(depth: int) -> None:
    engine = Harness(depth)
    engine.send(message("a", A), message("b", B, max_tokens=3), message("c", C))
    engine.until_idle()
    assert engine.tokens("a") == expected_tokens(A, 8)
    assert engine.tokens("b") == expected_tokens(B, 3)
    assert engine.tokens("c") == expected_tokens(C, 8)
    ends = [output.request for outputs in engine.outputs.values() for output in outputs if output.finish]
    assert sorted(ends) == ["a", "b", "c"]


def test_one_message_per_step(depth: int) -> None:
    engine = Harness(depth)
    engine.send(message("a", A), message("b", B))
    engine.until_idle()
    assert [len(each.outputs) for each in engine.received if isinstance(each, Outputs)] == [2] * 8


@pytest.mark.parametrize("while_launching", [True, False], ids=["launch", "collect"])
@pytest.mark.parametrize("broken", [0, 1, 3])
def test_a_step_that_raises_ends_only_its_own_requests(depth: int, broken: int, while_launching: bool) -> None:
    engine = Harness(depth, frozenset({broken}), while_launching, max_running_requests=2)
    engine.send(message("a", A), message("b", B), message("c", C))
    engine.until_idle()
    for request, prompt in (("a", A), ("b", B)):
        last = engine.last(request)
        assert last.finish is FinishReason.ERROR
        assert last.error == ("step_failed", "the engine failed on this step: the step failed")
        assert engine.tokens(request) == expected_tokens(prompt, 8)[:broken]
    assert engine.tokens("c") == expected_tokens(C, 8)
    assert engine.last("c").finish is FinishReason.LENGTH


def test_the_loop_continues_after_repeated_failures(depth: int) -> None:
    engine = Harness(depth, frozenset(range(4)))
    requests = [f"attempt {number}" for number in range(5)]
    for request in requests:
        engine.send(message(request, A))
        engine.until_idle()
    ends = [engine.last(request).finish for request in requests]
    failures = 4 // depth  # with overlap, each attempt has two steps in flight when the first one fails
    assert ends == [FinishReason.ERROR] * failures + [FinishReason.LENGTH] * (5 - failures)
    assert engine.tokens(requests[-1]) == expected_tokens(A, 8)


def test_kv_of_a_failed_step_is_never_hit(depth: int) -> None:
    """The failed step would have computed the prompt of "a"; a later request has the same prompt."""
    engine = Harness(depth, frozenset({0}))
    engine.send(message("a", A))
    engine.until_idle()
    engine.send(message("again", A))
    engine.until_idle()
    assert engine.last("again").cached_tokens == 0
    assert engine.tokens("again") == expected_tokens(A, 8)


def test_requests_that_can_never_be_scheduled_are_aborted(depth: int) -> None:
    engine = Harness(depth, scheduler=NeverPlans)
    engine.send(message("a", A))
    engine.step()
    assert engine.last("a").finish is FinishReason.ABORT
    assert engine.scheduler.idle


# ---- messages


def test_a_refused_request_gets_one_output_with_the_reason(depth: int) -> None:
    engine = Harness(depth)
    engine.send(message("empty", []), message("huge", [1] * (4 * PAGES + 2)), message("a", A))
    engine.until_idle()
    for request, code in (("empty", "empty_prompt"), ("huge", "exceeds_pool")):
        (only,) = engine.outputs[request]
        assert (only.finish, only.tokens) == (FinishReason.ERROR, [])
        assert only.error is not None
        assert only.error[0] == code
    assert engine.tokens("a") == expected_tokens(A, 8)


def test_a_request_with_a_grammar_is_never_served_without_it(depth: int) -> None:
    """The API process has accepted it, so that the engine should have grammars; if not, free text is no answer."""
    engine = Harness(depth)
    engine.send(msgspec.structs.replace(message("b", A), grammar=Grammar("{}")), message("a", A))
    engine.until_idle()
    (only,) = engine.outputs["b"]
    assert (only.finish, only.tokens, only.error and only.error[0]) == (FinishReason.ERROR, [], "no_grammars")
    assert engine.tokens("a") == expected_tokens(A, 8)


def test_a_duplicate_request_id_is_refused_and_the_first_request_continues(depth: int) -> None:
    engine = Harness(depth)
    engine.send(message("a", A), message("a", B))
    engine.until_idle()
    errors = [output.error[0] for output in engine.outputs["a"] if output.error]
    assert errors == ["duplicate_request"]
    assert engine.tokens("a") == expected_tokens(A, 8)


def test_abort_is_answered_while_other_requests_continue(depth: int) -> None:
    engine = Harness(depth)
    engine.send(message("a", A), message("b", B))
    engine.step(2)
    engine.send(Abort(["a"]))
    engine.until_idle()
    assert engine.last("a").finish is FinishReason.ABORT
    assert engine.tokens("b") == expected_tokens(B, 8)


def test_the_cache_is_not_flushed_while_requests_run(depth: int) -> None:
    engine = Harness(depth)
    engine.send(message("a", A))
    engine.step(2)
    engine.send(FlushCache(5))
    engine.until_idle()
    engine.send(message("hit", A))
    engine.until_idle()
    engine.send(FlushCache(6))
    engine.step()
    engine.send(message("miss", A))
    engine.until_idle()
    refused, done = engine.of_kind(Flushed)
    assert refused == Flushed(5, False, "requests are running; the cache can be flushed when none are")
    assert done == Flushed(6, True)
    assert (engine.last("hit").cached_tokens, engine.last("miss").cached_tokens) == (4, 0)


def test_statistics_are_sent_on_request_and_periodically(depth: int) -> None:
    engine = Harness(depth)
    engine.send(message("a", A), message("b", B))
    engine.step()
    engine.send(GetStats(17))
    engine.step()
    engine.until_idle()
    engine.step()
    (asked,) = (each for each in engine.of_kind(Stats) if isinstance(each, Stats) and each.call == 17)
    assert (asked.running, asked.waiting, asked.prompt_tokens) == (2, 0, 10)
    assert asked.pages_free + asked.pages_cached + asked.pages_held == asked.pages_total == PAGES
    periodic = [each for each in engine.of_kind(Stats) if isinstance(each, Stats) and each.call == -1]
    assert periodic
    assert (periodic[-1].running, periodic[-1].finished, periodic[-1].generated_tokens) == (0, 2, 16)
    counts = dict(zip([*BOUNDS, "more"], periodic[-1].step_tokens, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {8: 7, 16: 1}  # both prompts, then 2 each
    assert periodic[-1].computed_tokens == 2 * len(A) + 7 * 2


# ---- the end


def test_a_command_runs_between_two_steps_of_running_requests(depth: int) -> None:
    """After the steps that are in flight, and before any other."""
    engine = Harness(depth)
    engine.send(message("a", A))
    engine.step(2)
    outputs = len(engine.outputs["a"])
    engine.send(Control(3, StopProfile()), Control(4, StopProfile()))
    engine.until_idle()
    launched = outputs + depth - 1
    answers = [Answer([f"StopProfile after {launched} steps"])]
    assert engine.of_kind(Controlled) == [Controlled(3, answers), Controlled(4, answers)]
    before = engine.received[: engine.received.index(Controlled(3, answers))]
    assert len([each for each in before if isinstance(each, Outputs)]) == launched
    assert engine.tokens("a") == expected_tokens(A, 8)


def test_an_idle_engine_carries_out_a_command_at_once(depth: int) -> None:
    engine = Harness(depth)
    engine.send(Control(1, StopProfile()))
    engine.step()
    assert engine.of_kind(Controlled) == [Controlled(1, [Answer(["StopProfile after 0 steps"])])]


def test_drain_finishes_running_and_waiting_requests(depth: int) -> None:
    engine = Harness(depth, max_running_requests=1)
    engine.send(message("a", A), message("b", B))
    engine.step(2)
    engine.send(Drain(60.0), message("late", C))
    engine.run()
    assert engine.tokens("a") == expected_tokens(A, 8)
    assert engine.tokens("b") == expected_tokens(B, 8)
    assert engine.last("late").error == (
        "shutting_down",
        "the server is shutting down; send the request to another one",
    )
    assert engine.of_kind(Drained) == [Drained()]


def test_drain_without_time_aborts_all_requests(depth: int) -> None:
    engine = Harness(depth, max_running_requests=1)
    engine.send(message("a", A, max_tokens=200), message("b", B))
    engine.step(2)
    engine.send(Drain(0.0))
    engine.run()
    assert engine.last("a").finish is FinishReason.ABORT
    assert engine.last("b").finish is FinishReason.ABORT
    assert engine.of_kind(Drained) == [Drained()]


def test_an_idle_loop_drains_at_once(depth: int) -> None:
    engine = Harness(depth)
    engine.send(Drain(60.0))
    engine.run()
    assert engine.of_kind(Drained) == [Drained()]


def test_the_loop_stops_when_its_parent_is_gone(depth: int) -> None:
    """Also while requests run, because nobody can receive their outputs."""
    engine = Harness(depth)
    engine.send(message("a", A, max_tokens=200))
    engine.step()
    turns = iter([True, True, False])
    engine.run(lambda: next(turns))
    engine.executor.close()
    assert 0 < len(engine.tokens("a")) < 10
    assert engine.of_kind(Drained) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_integrity_is_checked_when_the_engine_is_idle(depth: int) -> None:
    """A leaked page is found when the engine is idle, not when the pool is exhausted."""
    harness = Harness(depth, scheduler=LosesCount)
    harness.send(message("a", A, 4))
    with pytest.raises(IntegrityError, match="lost"):
        harness.run()
    assert harness.scheduler.idle
