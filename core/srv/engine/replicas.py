"""Several replicas of an engine as one: the API process talks to them as to a single engine process.

    RequestSpec, Abort, Finish       to the replica of the request (`srv.engine.balance`)
    everything else                  to all; their answers become one
    Outputs                          from each, as they come

Each replica is an engine process with a scheduler, a prefix cache and ranks of its own. One that is lost ends all: a
supervisor starts the server again. Must not know HTTP, nor what requests mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from srv.args.config import Config
from srv.engine.balance import Balance
from srv.engine.supervisor import EngineProcess
from srv.errors import EngineDead, InternalError, StartError
from srv.executor.spec import EngineSpec
from srv.io.channel import SocketDirectory
from srv.io.messages import (
    Abort,
    Control,
    Controlled,
    Drained,
    Finish,
    FlushCache,
    Flushed,
    FromEngine,
    GetStats,
    Outputs,
    Pause,
    Paused,
    Ready,
    Stats,
    ToEngine,
)
from srv.types import RequestSpec

_PERIODIC_CALL = -1

Answered: TypeAlias = Stats | Flushed | Paused | Controlled
MakeSpec: TypeAlias = Callable[[str, str], EngineSpec]


class Engine(Protocol):
    """What starts, talks to and stops the engine: a process, or several replicas."""

    def start(self, environment: Callable[[int], Mapping[str, str]], ranks: int = 1) -> None: ...

    def send_spec(self, make_spec: MakeSpec) -> None: ...

    async def ready(self, timeout_s: float) -> Ready: ...

    async def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine: ...

    def dump_stacks(self) -> None: ...

    def kill(self) -> None: ...

    def close(self, *, drained: bool) -> None: ...


def make_engine(config: Config) -> Engine:
    """The engine process of one replica, or those of all."""
    method, replicas = config.parallel.load_balance_method, config.parallel.dp_size
    if replicas == 1:
        return EngineProcess()
    balance = Balance(method, replicas, prefix_cache=not config.memory.disable_radix_cache)
    return EngineReplicas(balance, replicas, together=config.parallel.enable_dp_attention)


class EngineReplicas:
    """Engine processes that serve as one. Implements `Engine`, and so `srv.server.client.Channel`.

    together: they compute each step together (data-parallel attention).
    """

    def __init__(self, balance: Balance, count: int, *, together: bool = False) -> None:
        self._meeting = SocketDirectory() if together else None
        self._replicas = [EngineProcess(number) for number in range(count)]
        self._balance = balance
        self._answers: dict[int, dict[int, Answered]] = {}  # by call and replica, of calls that not all have answered
        self._drained: set[int] = set()
        self._received: asyncio.Queue[tuple[int, FromEngine | BaseException]] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []

    def start(self, environment: Callable[[int], Mapping[str, str]], ranks: int = 1) -> None:
        """See `EngineProcess.start`. `ranks`: of each replica."""
        for replica in self._replicas:
            replica.start(environment, ranks, alone=self._meeting is None)

    def send_spec(self, make_spec: MakeSpec) -> None:
        """See `EngineProcess.send_spec`."""
        meeting = "" if self._meeting is None else str(self._meeting.path)
        for replica in self._replicas:
            replica.send_spec(lambda *addresses: msgspec.structs.replace(make_spec(*addresses), meeting=meeting))

    async def ready(self, timeout_s: float) -> Ready:
        """See `EngineProcess.ready`: all replicas are."""
        waiting = [asyncio.ensure_future(replica.ready(timeout_s)) for replica in self._replicas]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for number, task in enumerate(waiting):
                if task.done() and (error := task.exception()) is not None:
                    if isinstance(error, StartError):
                        raise StartError([f"replica {number}: {line}" for line in error.lines], error.status)
                    raise error
        finally:
            await _cancel(waiting)
        self._readers = [asyncio.create_task(self._read(number)) for number in range(len(self._replicas))]
        return _ready_of_all([task.result() for task in waiting])

    async def send(self, message: ToEngine) -> None:
        """Send a message to the replicas that it concerns."""
        match message:
            case RequestSpec():
                await self._replicas[self._balance.place(message)].send(message)
            case Abort(requests) if requests is not None:
                for number, own in self._by_replica(requests).items():
                    await self._replicas[number].send(Abort(own))
            case Finish(request):
                placed = self._balance.replica_of(request)
                self._balance.end(request)
                if placed is not None:
                    await self._replicas[placed].send(message)
            case _:
                if isinstance(message, FlushCache | GetStats | Control | Pause):
                    self._answers[message.call] = {}
                for replica in self._replicas:
                    await replica.send(message)

    async def receive(self) -> FromEngine:
        """The next message of any replica, or what the answers of all have become.

        Raises EngineDead once one of them has exited or announces its end.
        """
        while True:
            number, received = await self._received.get()
            if isinstance(received, EngineDead):
                raise EngineDead(f"replica {number}: {received}")
            if isinstance(received, BaseException):
                raise received
            if (message := self._joined(number, received)) is not None:
                return message

    async def _read(self, number: int) -> None:
        """Receive the messages of one replica, up to what ends them."""
        while True:
            try:
                self._received.put_nowait((number, await self._replicas[number].receive()))
            except Exception as error:  # noqa: BLE001 - `receive` raises it
                self._received.put_nowait((number, error))
                return

    def _joined(self, number: int, message: FromEngine) -> FromEngine | None:
        """The message for the API process; None as long as other replicas have to answer."""
        match message:
            case Outputs(outputs):
                for output in outputs:
                    self._balance.count(output)
                return message
            case Drained():
                self._drained.add(number)
                return message if len(self._drained) == len(self._replicas) else None
            case Stats() | Flushed() | Paused() | Controlled():
                return self._answer(number, message)
            case _:
                raise InternalError(f"replica {number} sent {type(message).__name__} while it serves")

    def _answer(self, number: int, message: Answered) -> Answered | None:
        """Periodic statistics count as answers to one call: a replica that hangs keeps those of all back."""
        if message.call == _PERIODIC_CALL:
            self._answers.setdefault(_PERIODIC_CALL, {})
        if (answers := self._answers.get(message.call)) is None:
            return None
        answers[number] = message
        if len(answers) < len(self._replicas):
            return None
        del self._answers[message.call]
        return _answer_of_all([answers[replica] for replica in range(len(self._replicas))])

    def _by_replica(self, requests: Sequence[str]) -> dict[int, list[str]]:
        """The requests of each replica, of those that have not ended."""
        own: dict[int, list[str]] = {}
        for request in requests:
            if (number := self._balance.replica_of(request)) is not None:
                own.setdefault(number, []).append(request)
        return own

    def dump_stacks(self) -> None:
        """See `EngineProcess.dump_stacks`."""
        for replica in self._replicas:
            replica.dump_stacks()

    def kill(self) -> None:
        """See `EngineProcess.kill`."""
        for replica in self._replicas:
            replica.kill()

    def close(self, *, drained: bool) -> None:
        """See `EngineProcess.close`. May be called without a running event loop."""
        for reader in self._readers:
            if not reader.get_loop().is_closed():
                reader.get_loop().call_soon_threadsafe(reader.cancel)
        exit_by_themselves = drained and self._meeting is None
        if not exit_by_themselves:
            self.kill()
        for replica in self._replicas:
            replica.close(drained=exit_by_themselves)
        if self._meeting is not None:
            self._meeting.close()


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ready_of_all(replicas: Sequence[Ready]) -> Ready:
    """Pages are those of all replicas; a request has to fit one. Kernels are the same everywhere."""
    first = replicas[0]
    phases = {
        f"replica {number}, {process}": phases
        for number, ready in enumerate(replicas)
        for process, phases in ready.phases.items()
    }
    return msgspec.structs.replace(
        first,
        pages=[sum(pages) for pages in zip(*(ready.pages for ready in replicas), strict=True)],
        max_request_tokens=min(ready.max_request_tokens for ready in replicas),
        load_seconds=max(ready.load_seconds for ready in replicas),
        memory=[lines for ready in replicas for lines in ready.memory],
        counts_peak=all(ready.counts_peak for ready in replicas),
        phases=phases,
    )


def _answer_of_all(answers: Sequence[Answered]) -> Answered:
    """One answer to a call, from those of all replicas in their order."""
    first = answers[0]
    match first:
        case Stats():
            return sum_of([answer for answer in answers if isinstance(answer, Stats)])
        case Flushed(call):
            refused = next((answer for answer in answers if isinstance(answer, Flushed) and not answer.done), None)
            return refused or Flushed(call, done=True)
        case Paused(call):
            return Paused(call, all(isinstance(answer, Paused) and answer.paused for answer in answers))
        case Controlled(call):
            ranks = [answer.answers for answer in answers if isinstance(answer, Controlled)]
            return Controlled(call, [own for answer in ranks for own in answer])


def sum_of(stats: Sequence[Stats]) -> Stats:
    """The statistics of all replicas together."""
    summed = (name for name in Stats.__struct_fields__ if name != "call")
    totals: dict[str, Any] = {name: _total(name, [getattr(own, name) for own in stats]) for name in summed}
    return Stats(call=stats[0].call, **totals)


def _total(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, int):
        return sum(values)
    if isinstance(first, list):
        length = max(map(len, values))
        return [sum(own[index] for own in values if index < len(own)) for index in range(length)]
    keys = dict.fromkeys(key for own in values for key in own)
    if all(isinstance(value, int) for own in values for value in own.values()):
        return {key: sum(own.get(key, 0) for own in values) for key in keys}
    if name == "inert":  # a feature has had no effect if it had none anywhere
        return {key: first[key] for key in first if all(key in own for own in values)}
    return {key: next(own[key] for own in values if key in own) for key in keys}
