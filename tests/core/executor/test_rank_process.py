"""A rank process's message loop with worker doubles: overlap, order of answers, and what failures become."""

from __future__ import annotations

import gc
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from srv.commands import Answer, Command, StopProfile
from srv.dist.group import RankGroup
from srv.executor.in_process import InProcessExecutor
from srv.executor.protocol import Allocation, Launched, RankMemory
from srv.executor.rank_messages import (
    Allocate,
    Allocated,
    ControlRank,
    Failed,
    FromRank,
    Measure,
    Ping,
    Pong,
    RankControlled,
    RankLoaded,
    RankSpec,
    RunStep,
    SampleStep,
    Stepped,
    ToRank,
    digest,
)
from srv.memory.groups import PageGroup
from srv.planning.budget import Budget
from srv.sched.late import LateInputs
from srv.sched.plan import Plan, Result, RowResult
from srv.types import TokenLogprob
from srv.worker.process import RankProcess

BUDGET = Budget((PageGroup(5, 16),), 80, ())
TIMEOUT_MS = 10_000


@dataclass
class Blocked:
    """A step that has been computed once `done` is set."""

    result: Result
    done: threading.Event
    failing: bool

    def collect(self) -> Result:
        assert self.done.wait(TIMEOUT_MS / 1000), "the next step was not launched"
        if self.failing:
            raise ValueError("collect")
        return self.result


class FakeWorker:
    """An asynchronous device: a step has been computed once the next one is launched.

    The steps in `launch_errors` and `collect_errors` fail there; `measure` and `control` always do.
    """

    def __init__(self, launch_errors: Collection[int] = (), collect_errors: Collection[int] = ()) -> None:
        self._launch_errors, self._collect_errors = launch_errors, collect_errors
        self._next: dict[int, threading.Event] = {}

    def load(self) -> None:
        pass

    def measure(self) -> RankMemory:
        raise KeyError("measure")

    def allocate(self, budget: Budget) -> Allocation:
        return Allocation(budget.pages[0], ())

    def launch(self, plan: Plan) -> Launched | None:
        self._next.setdefault(plan.step - 1, threading.Event()).set()
        if plan.step in self._launch_errors:
            raise ValueError("launch")
        return None if plan.late else self.sample(plan.step, LateInputs())

    def sample(self, step: int, late: LateInputs) -> Launched:
        failing = step in self._collect_errors
        return Blocked(Result(step, ()), self._next.setdefault(step, threading.Event()), failing)

    def control(self, command: Command) -> Answer:
        raise ValueError("no such command")

    def close(self) -> None:
        gc.unfreeze()  # what RankProcess has frozen
        for event in self._next.values():
            event.set()


class Engine:
    """The engine's end of the sockets of one rank, whose process runs on a thread."""

    def __init__(self, folder: Path, worker: FakeWorker, rank: int = 0) -> None:
        to_rank, from_ranks = f"ipc://{folder}/to", f"ipc://{folder}/from"
        engine: Any = None  # the doubles need no EngineSpec
        spec = RankSpec(
            engine=engine,
            group=RankGroup(rank=rank, size=2),
            number=rank,
            to_rank=to_rank,
            from_ranks=from_ranks,
            parent=0,
        )
        self._context = zmq.Context()
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._out.bind(to_rank)
        self._in.bind(from_ranks)
        self._process = RankProcess(spec)
        self.thread = threading.Thread(target=lambda: self._process.run(lambda *_: worker), daemon=True)

    def send(self, message: ToRank) -> None:
        self._out.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromRank:
        assert self._in.poll(TIMEOUT_MS), "the rank does not answer"
        return msgspec.msgpack.decode(self._in.recv(), type=FromRank)

    def pending(self) -> bool:
        return bool(self._in.poll(50))

    def close(self) -> None:
        self._out.send(b"end")  # no message: the rank fails, and its thread ends
        self.thread.join(TIMEOUT_MS / 1000)
        assert not self.thread.is_alive()
        self._process.close()
        self._context.destroy(linger=0)


@contextmanager
def rank_process(folder: Path, worker: FakeWorker, rank: int = 0) -> Iterator[Engine]:
    engine = Engine(folder, worker, rank)
    engine.thread.start()
    try:
        assert engine.receive() == RankLoaded(rank)
        yield engine
    finally:
        engine.close()


def plan(step: int, late: tuple[int, ...] = ()) -> RunStep:
    return RunStep(Plan(step, (), (), (), late))


def test_the_next_step_is_launched_while_the_device_computes(tmp_path: Path) -> None:
    """Answers keep the order of steps, and errors stay with theirs; other messages are answered after them."""
    with rank_process(tmp_path, FakeWorker(launch_errors=[3], collect_errors=[2])) as engine:
        for step in range(1, 6):
            engine.send(plan(step))
        answers = [engine.receive() for _ in range(4)]
        engine.send(Ping())
        engine.send(plan(6))  # completes step 5
        answers += [engine.receive() for _ in range(2)]
        engine.send(plan(7))
        answers.append(engine.receive())
    results = [Result(step, ()) for step in range(9)]
    good = {step: Stepped(0, step, digest(results[step]), results[step]) for step in (1, 4, 5, 6)}
    failed = {2: Stepped(0, 2, error="ValueError: collect"), 3: Stepped(0, 3, error="ValueError: launch")}
    assert answers == [good[1], failed[2], failed[3], good[4], good[5], Pong(0), good[6]]


def test_a_step_with_late_inputs_is_answered_once_it_samples(tmp_path: Path) -> None:
    """Also if its forward pass failed. Only the first rank returns results."""
    with rank_process(tmp_path, FakeWorker(launch_errors=[2]), rank=1) as engine:
        engine.send(plan(1, (0,)))
        engine.send(SampleStep(1, LateInputs()))
        engine.send(plan(2, (0,)))
        assert engine.receive() == Stepped(1, 1, digest(Result(1, ())))
        assert not engine.pending()
        engine.send(SampleStep(2, LateInputs()))
        assert engine.receive() == Stepped(1, 2, error="ValueError: launch")
        engine.send(plan(3))
        engine.send(plan(4))
        assert engine.receive() == Stepped(1, 3, digest(Result(3, ())))


def test_a_command_that_fails_is_answered(tmp_path: Path) -> None:
    """In both executors, and the rank goes on."""
    worker, answer = FakeWorker(), Answer(error="ValueError: no such command")
    with rank_process(tmp_path, worker) as engine:
        engine.send(ControlRank(StopProfile()))
        assert engine.receive() == RankControlled(0, answer)
        engine.send(Allocate(BUDGET))
        assert engine.receive() == Allocated(0, worker.allocate(BUDGET))
    executor = InProcessExecutor(worker)
    assert executor.control(StopProfile()) == [answer]
    executor.close()


def test_a_digest_covers_everything_that_a_row_returns() -> None:
    """Also vectors, which an embedding request returns without a token."""
    one, other = TokenLogprob(1, -0.5, 1), TokenLogprob(1, -0.25, 1)
    rows = [RowResult(0), RowResult(1), RowResult(0, (1,)), RowResult(0, (2,)), RowResult(0, error=("code", "text"))]
    rows += [RowResult(0, (1,), (each,)) for each in (one, other)]
    rows += [RowResult(0, (1,), None, (each,)) for each in (one, other)]
    rows += [RowResult(0, vectors=each) for each in (b"", b"\0\0\x80?", b"\0\0\0@")]
    assert len({digest(Result(1, (row,))) for row in rows}) == len(rows)
    assert digest(Result(1, (rows[0],), way="graph")) == digest(Result(1, (rows[0],)))


def test_failures_of_the_start_and_after_it(tmp_path: Path) -> None:
    for before, line in (
        ([], "the engine could not start: KeyError: 'measure'"),
        ([Allocate(BUDGET)], "KeyError: 'measure'"),
    ):
        with rank_process(tmp_path, FakeWorker()) as engine:
            for message in before:
                engine.send(message)
                engine.receive()
            engine.send(Measure())
            assert engine.receive() == Failed(0, [line], 1)
