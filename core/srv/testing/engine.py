"""An engine without processes or HTTP: the real scheduler, runner and platform, driven from a test.

    with LocalEngine.launch(["--device", "NAME", "--model-path", path, "--dtype", "float32"]) as engine:
        outputs = engine.generate([Generate(...), ...])

Everything is what `srv launch` would build from the same arguments; only the sockets are replaced by queues.
"""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from srv.args.cli import add_arguments
from srv.cli.launch import engine_spec
from srv.cli.survey import Situation, survey
from srv.engine.build import Engine, build
from srv.engine.loop import EngineLoop
from srv.engine.spec import EngineSpec
from srv.errors import EngineDead, IntegrityError
from srv.io.channel import InProcessChannel
from srv.io.messages import FlushCache, FromEngine, Generate, GetStats, Outputs, Stats, ToEngine
from srv.types import FinishReason, TokenLogprob

TIMEOUT_S = 300.0
_CALL = 1  # periodic statistics carry another number


@dataclass
class Generated:
    """Everything the engine said of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: tuple[str, str] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


class LocalEngine:
    """One engine in this process, stepped by the caller's thread."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self._channel = InProcessChannel()
        self._engine: Engine = build(self.spec())
        self.ready = self._engine.ready
        self.loop = EngineLoop(self._engine.scheduler, self._engine.executor, self._channel, self._engine.depth)
        self.results: dict[str, Generated] = {}
        self._answer: Stats | None = None

    @classmethod
    def launch(cls, arguments: Sequence[str]) -> Self:
        """What `srv launch` with these arguments would start. Raises what it would refuse with."""
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        namespace, unknown = parser.parse_known_args(list(arguments))
        namespace.unknown = unknown
        return cls(survey(namespace, {}))

    def spec(self) -> EngineSpec:
        """What the engine is built from. Tests override it to build what no argument can ask for."""
        return engine_spec(self.situation, "", "")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.executor.close()

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Generate):
            self.results[message.request] = Generated()
        self._channel.put(message)

    def step(self) -> None:
        """One turn of the loop; what it said is gathered in `results`."""
        self.loop.step(0)
        while True:
            try:
                self._take(self._channel.take(0))
            except queue.Empty:
                return

    def generate(self, messages: Iterable[Generate]) -> list[Generated]:
        """Send these requests at once and step until each has ended; in the order given."""
        sent = list(messages)
        for message in sent:
            self.send(message)
        self.run([message.request for message in sent])
        return [self.results[message.request] for message in sent]

    def run(self, requests: Sequence[str]) -> None:
        """Step until these requests have ended. EngineDead after TIMEOUT_S."""
        deadline = time.monotonic() + TIMEOUT_S
        while any(self.results[request].finish is None for request in requests):
            if time.monotonic() > deadline:
                raise EngineDead(f"requests {list(requests)} did not end within {TIMEOUT_S:g} s")
            self.step()

    def stats(self) -> Stats:
        """Fresh statistics. Takes at least one step: what runs goes on meanwhile."""
        self._answer = None
        self.send(GetStats(_CALL))
        while self._answer is None:
            self.step()
        return self._answer

    def check_integrity(self, deep: bool = False) -> None:
        """free + cached + held == total, or IntegrityError; `deep` looks at each page."""
        self._engine.scheduler.check_integrity(deep)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Stats):
            if message.call == _CALL:
                self._answer = message
        elif isinstance(message, Outputs):
            for output in message.outputs:
                result = self.results[output.request]
                result.tokens += output.tokens
                result.logprobs += output.logprobs or []
                result.prompt_logprobs += output.prompt_logprobs or []
                result.finish = output.finish or result.finish
                result.stop_token = output.stop_token if output.stop_token is not None else result.stop_token
                result.error = output.error or result.error
                result.prompt_tokens = output.prompt_tokens or result.prompt_tokens
                result.cached_tokens = output.cached_tokens or result.cached_tokens


class WatchedEngine(LocalEngine):
    """An engine that accounts for every page after every step, and for all of them at the end."""

    def step(self) -> None:
        super().step()
        self.check_integrity(deep=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.check_rested()
        finally:
            super().__exit__(kind, error, trace)

    def check_rested(self) -> None:
        """Nothing runs, waits or holds a page, and without the prefix cache every page is free; or IntegrityError."""
        self.flush()
        stats = self.stats()
        if (stats.running, stats.waiting, stats.pages_held) != (0, 0, 0) or stats.pages_free != stats.pages_total:
            raise IntegrityError(
                f"after the last request {stats.running} run, {stats.waiting} wait, {stats.pages_held} pages are held,"
                f" and {stats.pages_free} of {stats.pages_total} are free"
            )

    def flush(self) -> None:
        """Forget the prefix cache, once the row that overlap may have planned past an end has landed."""
        self.step()
        self.send(FlushCache(0))
        self.step()
