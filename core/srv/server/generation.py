"""From engine outputs to what may be told: text, tokens and log-probabilities released together.

Owns one output sequence (`Sequence`), and several of them as one request (`Group`). Must not know HTTP or
the shape of any protocol.

    Output(tokens) ── pending tokens ──► released with the text they are part of ──► Step
                └──── detokenizer ──────► text that no stop string can cut any more
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import repeat

import msgspec

from srv.errors import EngineDead, RequestError
from srv.io.messages import Generate, Output
from srv.server.client import EngineClient
from srv.server.failures import engine_error
from srv.server.intake import Work
from srv.server.metrics import Metrics
from srv.server.text import TextProcessor
from srv.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Step:
    """What one sequence has to say now. `prompt_logprobs` come once, with the first step.

    `finish` is set on the last step; `matched` is the stop string or token id that ended the sequence.
    """

    sequence: Sequence
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob] | None
    finish: FinishReason | None
    matched: str | int | None


class Sequence:
    """One output. `index` is its place in the response, `prompt_index` that of its prompt."""

    def __init__(
        self,
        engine: EngineClient,
        text: TextProcessor,
        metrics: Metrics,
        work: Work,
        *,
        name: str,
        index: int,
        prompt_index: int,
        output_index: int,
        arrival: float,
        aborted: Callable[[], bool],
    ) -> None:
        self._aborted = aborted
        self.index, self.prompt_index, self.output_index = index, prompt_index, output_index
        self.work = work
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.finish: FinishReason | None = None
        self.matched: str | int | None = None
        self._engine, self._metrics, self._name, self._arrival = engine, metrics, name, arrival
        self._detokenizer = text.detokenizer(work.tokens, work.stop, work.skip_special_tokens, work.include_stop)
        self._pending: deque[tuple[int, TokenLogprob | None]] = deque()
        self._prompt_logprobs: list[TokenLogprob] = []
        self._told_prompt_logprobs = work.params.prompt_logprobs is None
        self._received = 0
        self._last_token_at = 0.0

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Steps with something to say, the last with `finish`. Raises RequestError or EngineDead.

        Closing the iterator early aborts the sequence at the engine.
        """
        if self._aborted():  # between its admission and now: the engine has never heard of it
            self.finish = FinishReason.ABORT
            self._metrics.sequence_ended(FinishReason.ABORT, time.perf_counter() - self._arrival)
            yield self._step("", [])
            return
        params = msgspec.structs.replace(self.work.params, seed=self.work.seeds[self.output_index])
        message = Generate(request=self._name, tokens=self.work.tokens, params=params)
        ended = FinishReason.ABORT  # unless something else is learnt
        try:
            async with aclosing(self._engine.generate(message)) as outputs:
                async for output in outputs:
                    step = self._take(output)
                    if self.finish is not None:
                        ended = self.finish
                    if step is not None:
                        yield step
                    if self.finish is not None:
                        return
        except (EngineDead, RequestError):
            ended = FinishReason.ERROR
            raise
        finally:
            self._metrics.sequence_ended(ended, time.perf_counter() - self._arrival)

    def _take(self, output: Output) -> Step | None:
        if output.finish is FinishReason.ERROR:
            code, message = output.error or ("engine_error", "the engine failed on this request")
            raise engine_error(code, message)
        self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs:
            self._prompt_logprobs.extend(output.prompt_logprobs)
        if output.tokens:
            self._measure(len(output.tokens))
        if self.work.score_only:
            return self._scored(output)
        logprobs: Iterable[TokenLogprob | None] = output.logprobs or repeat(None, len(output.tokens))
        self._pending.extend(zip(output.tokens, logprobs, strict=True))
        self._received += len(output.tokens)
        return self._release(output)

    def _measure(self, tokens: int) -> None:
        now = time.perf_counter()
        if self._last_token_at == 0.0:
            self._metrics.first_token(now - self._arrival)
        else:
            self._metrics.next_tokens(now - self._last_token_at, tokens)
        self._last_token_at = now

    def _release(self, output: Output) -> Step | None:
        hidden = output.stop_token is not None and not self.work.include_stop
        piece = self._detokenizer.push(output.tokens[:-1] if hidden else output.tokens, output.finish is not None)
        used = piece.tokens_used
        if piece.stopped is not None:
            self.finish, self.matched = FinishReason.STOP, piece.stopped
            self._engine.finish(self._name)
        elif output.finish is not None:
            self.finish, self.matched, used = output.finish, output.stop_token, self._received
        released = [self._pending.popleft() for _ in range(used - self.completion_tokens)]
        self.completion_tokens = used
        if not (piece.text or released or self.finish):
            return None
        return self._step(piece.text, released)

    def _scored(self, output: Output) -> Step | None:
        if output.finish is None:
            return None
        self.finish = FinishReason.ABORT if output.finish is FinishReason.ABORT else FinishReason.LENGTH
        return self._step("", [])

    def _step(self, text: str, released: list[tuple[int, TokenLogprob | None]]) -> Step:
        prompt_logprobs = None
        if not self._told_prompt_logprobs:
            prompt_logprobs, self._told_prompt_logprobs = self._prompt_logprobs, True
        return Step(
            sequence=self,
            text=text,
            tokens=[token for token, _ in released],
            logprobs=[logprob for _, logprob in released if logprob is not None],
            prompt_logprobs=prompt_logprobs,
            finish=self.finish,
            matched=self.matched,
        )


@dataclass(slots=True)
class Gathered:
    """One sequence, complete."""

    sequence: Sequence
    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def finish(self) -> FinishReason:
        assert self.sequence.finish is not None
        return self.sequence.finish

    def add(self, step: Step) -> None:
        self.parts.append(step.text)
        self.tokens.extend(step.tokens)
        self.logprobs.extend(step.logprobs)
        if step.prompt_logprobs is not None:
            self.prompt_logprobs = step.prompt_logprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request: a prompt counts once, however many outputs it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def openai(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Group:
    """The sequences of one client request, prompt by prompt, in the order of the response."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences

    def usage(self) -> Usage:
        first = [sequence for sequence in self.sequences if sequence.output_index == 0]
        return Usage(
            prompt_tokens=sum(len(sequence.work.tokens) for sequence in first),
            completion_tokens=sum(sequence.completion_tokens for sequence in self.sequences),
            cached_tokens=sum(sequence.cached_tokens for sequence in first),
        )

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Steps of all sequences as they come. The first failure ends them all, and is raised."""
        if len(self.sequences) == 1:
            async with aclosing(self.sequences[0].steps()) as steps:
                async for step in steps:
                    yield step
            return
        queue: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(_feed(sequence, queue)) for sequence in self.sequences]
        try:
            open_sequences = len(tasks)
            while open_sequences:
                item = await queue.get()
                if item is None:
                    open_sequences -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def gather(self) -> list[Gathered]:
        """Every sequence, complete."""
        results = [Gathered(sequence) for sequence in self.sequences]
        async with aclosing(self.steps()) as steps:
            async for step in steps:
                results[step.sequence.index].add(step)
        return results


async def _feed(sequence: Sequence, queue: asyncio.Queue[Step | BaseException | None]) -> None:
    try:
        async for step in sequence.steps():
            queue.put_nowait(step)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        queue.put_nowait(error)  # raised by the reader of the queue
        raise
    queue.put_nowait(None)
