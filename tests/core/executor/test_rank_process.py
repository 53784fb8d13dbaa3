"""A rank process's message loop with worker doubles: overlap, order of answers, and what failures become."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    Control,
    Controlled,
    Failed,
    FromRank,
    Loaded,
    Measure,
    RankSpec,
    ToRank,
    digest,
)
from srv.planning.budget import Budget
from srv.sched.late import LateInputs
from srv.sched.plan import Plan, Result, RowResult
from srv.types import TokenLogprob
from srv.worker.process import RankProcess

BUDGET = Budget((5,), 16, 80, ())
TIMEOUT_MS = 10_000


@dataclass
class FakeWorker:
    """Counts launches; `measure` and `control` fail."""

    launched: list[int] = field(default_factory=list)

    def load(self) -> None:
        pass

    def measure(self) -> RankMemory:
        raise KeyError("measure")

    def allocate(self, budget: Budget) -> Allocation:
        return Allocation(0, budget.pages[0], ())

    def launch(self, plan: Plan) -> Launched:
        raise NotImplementedError

    def sample(self, step: int, late: LateInputs) -> Launched:
        raise NotImplementedError

    def control(self, command: Command) -> Answer:
        raise ValueError("no such command")

    def close(self) -> None:
        gc.unfreeze()  # what RankProcess has frozen


class Engine:
    """The engine's end of the sockets of one rank, whose process runs on a thread."""

    def __init__(self, folder: Path, worker: FakeWorker, rank: int = 0) -> None:
        self._context = zmq.Context()
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        to_rank, from_ranks = f"ipc://{folder}/to", f"ipc://{folder}/from"
        self._out.bind(to_rank)
        self._in.bind(from_ranks)
        engine: Any = None  # the doubles need no EngineSpec
        spec = RankSpec(
            engine=engine, group=RankGroup(rank=rank, size=2), to_rank=to_rank, from_ranks=from_ranks, parent=0
        )
        self._process = RankProcess(spec)
        self.thread = threading.Thread(target=lambda: self._process.run(lambda *_: worker), daemon=True)

    def send(self, message: ToRank) -> None:
        self._out.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromRank:
        assert self._in.poll(TIMEOUT_MS), "the rank does not answer"
        return msgspec.msgpack.decode(self._in.recv(), type=FromRank)

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
        assert engine.receive() == Loaded(rank)
        yield engine
    finally:
        engine.close()


def test_a_command_that_fails_is_answered(tmp_path: Path) -> None:
    """In both executors, and the rank goes on."""
    worker, answer = FakeWorker(), Answer(error="ValueError: no such command")
    with rank_process(tmp_path, worker) as engine:
        engine.send(Control(StopProfile()))
        assert engine.receive() == Controlled(0, answer)
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
    assert digest(Result(1, (rows[0],), replayed=True)) == digest(Result(1, (rows[0],)))


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
