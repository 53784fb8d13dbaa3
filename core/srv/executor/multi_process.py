"""The executor with one process per rank on this host; imports no torch.

    engine process                                     rank process (srv.worker.process), one per rank
    PUSH ──► to_rank_N.sock ──► PULL   plans           launches, collects, and answers with a digest of its result;
    PULL ◄── from_ranks.sock ◄─ PUSH   answers         the first rank also with the result

Each plan goes to all ranks, which compute their shares of it together. A rank that ends, does not answer or returns
another result than the others raises RankLost with its name and the reason. The sockets and what the ranks need to find
one another are in a private directory.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import msgspec
import zmq

from srv.commands import Answer, Command
from srv.dist.group import RankGroup
from srv.dist.mesh import mesh_of
from srv.errors import EngineDead, InternalError, RankLost, SrvError, StartError
from srv.executor.protocol import Allocation, RankMemory, StepFuture
from srv.executor.rank_messages import (
    Allocate,
    Allocated,
    ControlRank,
    Failed,
    FromRank,
    Measure,
    Measured,
    Ping,
    Pong,
    RankControlled,
    RankLoaded,
    RankSpec,
    RunStep,
    SampleStep,
    Stepped,
    ToRank,
)
from srv.executor.spec import EngineSpec, encode
from srv.io import child
from srv.io.channel import SocketDirectory
from srv.planning.budget import Budget
from srv.platform import registry
from srv.platform.manifest import worker_environment
from srv.sched.late import LateInputs
from srv.sched.plan import Plan, Result

DEFAULT_TIMEOUT_S = 4  # of `dist_timeout`: a lost rank ends the engine within 5 seconds
_POLL_MS = 100  # how often the processes are checked while an answer is awaited
_GRACE_S = 0.5  # how long the other ranks may take to answer after one has failed
_PING_INTERVAL_S = 0.5

Reply = TypeVar("Reply", RankLoaded, Measured, Allocated, Stepped, RankControlled, Pong)


class StepFailed(InternalError):
    """A step raised the same exception on all ranks, which are still in step."""


class _Rank:
    """One rank process and the socket to it."""

    def __init__(self, number: int, socket: zmq.Socket[bytes], process: subprocess.Popen[bytes]) -> None:
        self.number, self.socket, self.process = number, socket, process
        self.answers: deque[FromRank] = deque()  # received, and not used yet
        self.stopped_since: float | None = None  # found stopped by a signal, and not heard from since

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"

    def answer(self) -> FromRank | None:
        """The oldest unused answer."""
        return self.answers[0] if self.answers else None


def _failure(answer: FromRank | None) -> Failed | Stepped | None:
    """The answer if it reports an exception."""
    if isinstance(answer, Failed):
        return answer
    return answer if isinstance(answer, Stepped) and answer.error is not None else None


class _MultiProcessFuture:
    def __init__(self, result: Callable[[], Result]) -> None:
        self._result = result

    def result(self) -> Result:
        return self._result()


class MultiProcessExecutor:
    """Runs an engine's ranks in processes of their own. All methods are called on one thread."""

    module: ClassVar[str] = "srv.worker.process"  # what a rank process runs

    def __init__(self, spec: EngineSpec) -> None:
        config = spec.config
        self._spec, self._mesh = spec, mesh_of(config.get)
        self._size = self._mesh.ranks_per_replica
        self._timeout_s = float(config.parallel.dist_timeout or DEFAULT_TIMEOUT_S)
        self._start_timeout_s = float(config.server.engine_start_timeout_seconds)
        self._directory = SocketDirectory()
        self._context = zmq.Context()
        self._answers: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._answers.set_hwm(0)
        self._answers.bind(self._directory.address("from_ranks"))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._ranks: list[_Rank] = []
        self._ping_due = 0.0
        self._parent = os.getppid()
        self._started = False  # whether `allocate` has returned

    def start(self) -> None:
        for number in range(self._size):
            self._ranks.append(self._spawn(number))
        self._gather(RankLoaded, self._start_timeout_s)

    def _spawn(self, number: int) -> _Rank:
        address = self._directory.address(f"to_rank_{number}")
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        # Ranks of replicas that compute each step together are one group.
        first = self._spec.replica * self._size if self._mesh.replicas > 1 else 0
        group = RankGroup(
            rank=first + number,
            size=self._mesh.tensor,
            directory=self._spec.meeting or str(self._directory.path),
            timeout_s=self._timeout_s,
            start_timeout_s=self._start_timeout_s,
        )
        spec = RankSpec(
            engine=self._spec,
            group=group,
            number=number,
            to_rank=address,
            from_ranks=self._directory.address("from_ranks"),
            parent=os.getpid(),
        )
        manifest = registry.find_platforms()[self._spec.platform].loaded
        local_rank = self._spec.replica * self._size + number
        process = child.spawn(self.module, worker_environment(manifest, self._spec.device, local_rank))
        child.send(process, encode(spec))
        return _Rank(number, socket, process)

    def measure(self) -> list[RankMemory]:
        self._send(Measure())
        return [answer.memory for answer in self._gather(Measured, self._start_timeout_s)]

    def allocate(self, budget: Budget) -> list[Allocation]:
        self._send(Allocate(budget))
        answers = self._gather(Allocated, self._start_timeout_s)
        self._started = True
        return [answer.allocation for answer in answers]

    def submit(self, plan: Plan) -> StepFuture:
        self._send(RunStep(plan))
        return _MultiProcessFuture(lambda: self._result(plan.step))

    def sample(self, step: int, late: LateInputs) -> None:
        self._send(SampleStep(step, late))

    def control(self, command: Command) -> list[Answer]:
        self._send(ControlRank(command))
        return [controlled.answer for controlled in self._gather(RankControlled, self._start_timeout_s)]

    def check(self) -> None:
        """While idle, every rank has to answer a message twice a second."""
        now = time.monotonic()
        if now < self._ping_due:
            return
        self._send(Ping())
        self._gather(Pong, self._timeout_s)
        self._ping_due = now + _PING_INTERVAL_S

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.kill()  # also ends a rank that hangs or is stopped
        for rank in self._ranks:
            rank.process.wait()
        self._context.destroy(linger=0)
        self._directory.close()

    def _send(self, message: ToRank) -> None:
        encoded = self._encoder.encode(message)
        for rank in self._ranks:
            while True:
                try:
                    rank.socket.send(encoded, zmq.NOBLOCK)
                    break
                except zmq.Again:  # its process has ended, or has not connected completely
                    if (status := child.exit_status(rank.process)) is not None:
                        raise self._lost(f"{rank} ended with {status}") from None
                    rank.socket.poll(_POLL_MS, zmq.POLLOUT)

    def _result(self, step: int) -> Result:
        answers = self._gather(Stepped, None)
        first = answers[0]
        if all(answer.error is not None and not answer.peer_lost for answer in answers):
            raise StepFailed(first.error)
        if any(answer.error is not None for answer in answers):
            raise self._loss(answers)
        for rank, answer in zip(self._ranks, answers, strict=True):
            if (answer.step, answer.digest) != (step, first.digest):
                raise RankLost(f"{rank} returned another result than rank 0 for step {step}: the ranks have diverged")
        assert first.result is not None
        return first.result

    def _gather(self, kind: type[Reply], timeout_s: float | None) -> list[Reply]:
        """The next answer of every rank, in the order of ranks.

        `timeout_s` None: ranks may compute as long as they like, but together: once one has answered, the others have
        to. Ranks that all hang in the same step are therefore not found (ADR 0018).

        Raises the error of the rank at fault if one ends, fails, is stopped or does not answer, and EngineDead if the
        parent of this process has exited.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failed = False
        while missing := [rank for rank in self._ranks if not rank.answers]:
            if self._answers.poll(_POLL_MS):
                self._receive()
                continue
            if os.getppid() != self._parent:
                raise EngineDead("the API process has exited")
            for rank in missing:
                self._check_process(rank)
            now = time.monotonic()
            if not failed and any(_failure(rank.answer()) for rank in self._ranks):
                failed, deadline = True, now + (_GRACE_S if self._started else self._timeout_s)
            elif deadline is None and len(missing) < self._size:
                deadline = now + self._timeout_s
            if deadline is not None and now > deadline:
                raise self._loss([rank.answer() for rank in self._ranks])
        if any(isinstance(rank.answer(), Failed) for rank in self._ranks):
            raise self._loss([rank.answer() for rank in self._ranks])
        return [self._take(rank, kind) for rank in self._ranks]

    def _receive(self) -> None:
        answer = self._decoder.decode(self._answers.recv())
        rank = self._ranks[answer.rank]
        rank.answers.append(answer)
        rank.stopped_since = None

    def _take(self, rank: _Rank, kind: type[Reply]) -> Reply:
        answer = rank.answers.popleft()
        if not isinstance(answer, kind):
            raise InternalError(f"{rank} sent {type(answer).__name__}, not {kind.__name__}")
        return answer

    def _check_process(self, rank: _Rank) -> None:
        """Raises the error of a rank that has ended and left no message, or has been stopped for too long.

        Only the second check finds that all ranks are stopped: otherwise one would wait for the others, and report it.
        """
        status = child.exit_status(rank.process)
        if status is not None:
            if not self._answers.poll(_POLL_MS):
                raise self._lost(f"{rank} ended with {status}")
        elif not child.is_stopped(rank.process):
            rank.stopped_since = None
        elif rank.stopped_since is None:
            rank.stopped_since = time.monotonic()
        elif time.monotonic() - rank.stopped_since > self._timeout_s:
            raise self._silent(rank)

    def _silent(self, rank: _Rank) -> SrvError:
        return self._lost(f"{rank} {'is stopped' if rank.stopped_since else 'does not answer'}")

    def _loss(self, answers: Sequence[FromRank | None]) -> SrvError:
        """The error of the rank at fault: one that failed by itself, or else one that has not answered.

        `answers`: of each rank, None for one that has not answered.
        """
        ranks = list(zip(self._ranks, answers, strict=True))
        failures = [(rank, failure) for rank, answer in ranks if (failure := _failure(answer))]
        own = [(rank, failure) for rank, failure in failures if not failure.peer_lost]
        missing = [rank for rank, answer in ranks if answer is None]
        if missing and not own:
            return self._silent(min(missing, key=lambda rank: rank.stopped_since is None))
        rank, failure = (own or failures)[0]
        if isinstance(failure, Stepped):
            return self._lost(f"{rank} failed on step {failure.step}: {failure.error}")
        if self._started:
            return RankLost(f"{rank} failed: {'; '.join(failure.lines)}")
        return StartError([f"rank {rank.number}: {line}" for line in failure.lines], failure.status)

    def _lost(self, text: str) -> SrvError:
        """The error of a lost rank: it ends the start, or later the engine."""
        return RankLost(text) if self._started else StartError([f"the engine could not start: {text}"], 1)
