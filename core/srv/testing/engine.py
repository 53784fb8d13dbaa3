"""An engine without processes or HTTP: the real scheduler, runner and platform, driven from a test.

    with LocalEngine.launch(["--device", "NAME", "--model-path", path, "--dtype", "float32"]) as engine:
        outputs = engine.generate([RequestSpec(...), ...])

It is the same engine that `srv launch` would build from the same arguments; only the sockets are replaced by queues.
"""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

from srv.args.cli import add_arguments
from srv.args.sources import gather
from srv.args.statement import UserInput
from srv.engine.build import Engine, build, choose_executor
from srv.errors import EngineDead, IntegrityError
from srv.executor.protocol import Allocation, Executor
from srv.executor.spec import EngineSpec, engine_spec
from srv.io.channel import InProcessChannel
from srv.io.messages import FlushCache, FromEngine, GetStats, Outputs, Stats, ToEngine
from srv.planning.budget import Budget
from srv.planning.resolution import FindTarget, LaunchContext, resolve_launch
from srv.planning.target import this_machine
from srv.sched.late import LateInputMaker
from srv.types import FinishReason, RequestSpec, TokenLogprob

TIMEOUT_S = 300.0
_STATS_CALL = 1  # identifies answers to GetStats; periodic reports have another number


@dataclass
class GenerationResult:
    """All outputs of one request, concatenated."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: tuple[str, str] | None = None
    cached_tokens: int = 0
    vectors: bytes = b""  # float32, little-endian


class LocalEngine:
    """One engine in this process. The caller's thread runs its loop, step by step."""

    def __init__(self, context: LaunchContext) -> None:
        self.context = context
        self._channel = InProcessChannel()
        self._engine: Engine = build(self.spec(), self.make_executor, self.late_inputs())
        self.ready = self._engine.ready
        self.loop = self._engine.loop(self._channel)
        self.results: dict[str, GenerationResult] = {}
        self._stats: Stats | None = None

    @classmethod
    def launch(cls, arguments: Sequence[str], find_target: FindTarget = this_machine) -> Self:
        """The engine that `srv launch` would start with these arguments. Raises Refusal if it would refuse them.

        `find_target`: finds the device; tests that start many engines need not probe it each time.
        """
        return cls(resolve_launch(user_input(arguments), find_target))

    def spec(self) -> EngineSpec:
        """The spec that the engine is built from. Tests override it to build engines that no argument can configure."""
        return engine_spec(self.context, "", "")

    def late_inputs(self) -> LateInputMaker | None:
        """What makes late inputs, instead of the requests' grammars. Tests override it."""
        return None

    def make_executor(self, spec: EngineSpec) -> Executor:
        """The executor that `srv launch` would start. Tests override it."""
        self.executor = choose_executor(spec)
        return self.executor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.executor.close()

    def send(self, message: ToEngine) -> None:
        if isinstance(message, RequestSpec):
            self.results[message.id] = GenerationResult()
        self._channel.put(message)

    def step(self) -> None:
        """Run one iteration of the engine loop and collect its outputs in `results`."""
        self.loop.step(0)
        while True:
            try:
                self._collect(self._channel.take(0))
            except queue.Empty:
                return

    def generate(self, messages: Iterable[RequestSpec]) -> list[GenerationResult]:
        """Send these requests together, step until all have ended, and return their results in the same order."""
        requests = list(messages)
        for message in requests:
            self.send(message)
        self.run([message.id for message in requests])
        return [self.results[message.id] for message in requests]

    def run(self, requests: Sequence[str]) -> None:
        """Step until these requests have ended. Raises EngineDead after TIMEOUT_S seconds."""
        deadline = time.monotonic() + TIMEOUT_S
        while any(self.results[request].finish is None for request in requests):
            if time.monotonic() > deadline:
                raise EngineDead(f"requests {list(requests)} did not end within {TIMEOUT_S:g} s")
            self.step()

    def stats(self) -> Stats:
        """Current statistics. Runs at least one step, in which running requests make progress."""
        self._stats = None
        self.send(GetStats(_STATS_CALL))
        while self._stats is None:
            self.step()
        return self._stats

    def check_integrity(self, deep: bool = False) -> None:
        """Raises IntegrityError unless free + cached + held == total; `deep` checks every page."""
        self._engine.scheduler.check_integrity(deep)

    def _collect(self, message: FromEngine) -> None:
        if isinstance(message, Stats):
            if message.call == _STATS_CALL:
                self._stats = message
        elif isinstance(message, Outputs):
            for output in message.outputs:
                result = self.results[output.request]
                result.tokens += output.tokens
                result.logprobs += output.logprobs or []
                result.prompt_logprobs += output.prompt_logprobs or []
                result.finish = output.finish or result.finish
                result.stop_token = output.stop_token if output.stop_token is not None else result.stop_token
                result.error = output.error or result.error
                result.cached_tokens = output.cached_tokens or result.cached_tokens
                result.vectors += output.vectors or b""


def user_input(arguments: Sequence[str]) -> UserInput:
    """What `srv launch` with these arguments reads from its command line."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    namespace, unknown = parser.parse_known_args(list(arguments))
    namespace.unknown = unknown
    return gather(namespace, {})


class _UntimedExecutor:
    """An executor that reports no step times, so that the scheduler takes drafts to be free."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def allocate(self, budget: Budget) -> list[Allocation]:
        return [allocation._replace(step_seconds=()) for allocation in self._executor.allocate(budget)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class CheckedEngine(LocalEngine):
    """An engine that checks after every step that every page is accounted for, and at the end that all are free.

    Its drafts do not depend on how long steps take on this machine.
    """

    def make_executor(self, spec: EngineSpec) -> Executor:
        return cast(Executor, _UntimedExecutor(super().make_executor(spec)))

    def step(self) -> None:
        super().step()
        self.check_integrity(deep=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.check_idle()
        finally:
            super().__exit__(kind, error, trace)

    def check_idle(self) -> None:
        """Flush the prefix cache. Raises IntegrityError if a request is left or a page is not free after that."""
        self.flush()
        stats = self.stats()
        if (stats.running, stats.waiting, stats.pages_held) != (0, 0, 0) or stats.pages_free != stats.pages_total:
            raise IntegrityError(
                f"after the last request {stats.running} requests are running, {stats.waiting} are waiting,"
                f" {stats.pages_held} pages are held, and {stats.pages_free} of {stats.pages_total} pages are free"
            )

    def flush(self) -> None:
        """Flush the prefix cache, after one step that completes rows planned for requests that have ended since."""
        self.step()
        self.send(FlushCache(0))
        self.step()
