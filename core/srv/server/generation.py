"""Turns engine outputs into deltas that can be sent: text with its tokens and log-probabilities.

Owns one output sequence (`Sequence`), and the sequences of one client request (`RequestGroup`). Must not know HTTP or
the format of any protocol.

    Output(tokens) ── pending tokens ──► released together with their text ──► OutputDelta
                └──── detokenizer ──────► text that cannot be part of a stop string
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
from srv.io.messages import Output
from srv.server.client import EngineClient
from srv.server.metrics import Metrics
from srv.server.observers import Observers
from srv.server.preprocessor import TokenizedPrompt
from srv.server.text.processor import TextProcessor
from srv.types import FinishReason, RequestSpec, TokenLogprob


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New output of one sequence. `prompt_logprobs` is set on the first delta only.

    `finish` is set on the last delta; `matched` is the stop string or token id that ended the sequence.
    """

    sequence: Sequence
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob] | None
    finish: FinishReason | None
    matched: str | int | None


class Sequence:
    """One output sequence. `index` is its position in the response, `prompt_index` that of its prompt.

    `hidden_states`: float32, little-endian, of the positions computed so far; empty if they were not requested.
    """

    def __init__(
        self,
        engine: EngineClient,
        text: TextProcessor,
        metrics: Metrics,
        observers: Observers,
        prompt: TokenizedPrompt,
        *,
        name: str,
        index: int,
        prompt_index: int,
        output_index: int,
        arrival: float,
        aborted: Callable[[], bool],
    ) -> None:
        self._aborted, self._observers = aborted, observers
        self.index, self.prompt_index, self.output_index = index, prompt_index, output_index
        self.prompt = prompt
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.hidden_states = bytearray()
        self.finish: FinishReason | None = None
        self.matched: str | int | None = None
        self._engine, self._metrics, self._name, self._arrival = engine, metrics, name, arrival
        sampling = prompt.sampling
        self._detokenizer = text.detokenizer(
            prompt.tokens, sampling.stop, sampling.skip_special_tokens, sampling.include_stop_str_in_output
        )
        self._pending: deque[tuple[int, TokenLogprob | None]] = deque()
        self._prompt_logprobs: list[TokenLogprob] = []
        self._sent_prompt_logprobs = prompt.params.prompt_logprobs is None
        self._received = 0
        self._last_token_at = 0.0

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Yield the deltas, the last one with `finish` set. Raises RequestError or EngineDead.

        Closing the iterator early aborts the sequence at the engine.
        """
        if self._aborted():  # after its admission, before it was sent to the engine
            self.finish = FinishReason.ABORT
            self._metrics.sequence_ended(FinishReason.ABORT, time.perf_counter() - self._arrival)
            yield self._delta("", [])
            return
        params = msgspec.structs.replace(self.prompt.params, seed=self.prompt.seeds[self.output_index])
        spec = RequestSpec(id=self._name, tokens=tuple(self.prompt.tokens), params=params)
        reason = FinishReason.ABORT  # unless the engine reports another
        self._observers.started(spec)
        try:
            async with aclosing(self._engine.generate(spec)) as outputs:
                async for output in outputs:
                    delta = self._process_output(output)
                    if self.finish is not None:
                        reason = self.finish
                    if delta is not None:
                        yield delta
                    if self.finish is not None:
                        return
        except (EngineDead, RequestError):
            reason = FinishReason.ERROR
            raise
        finally:
            seconds = time.perf_counter() - self._arrival
            self._metrics.sequence_ended(reason, seconds)
            self._observers.finished(spec, reason, self.cached_tokens, self.completion_tokens, seconds)

    def _process_output(self, output: Output) -> OutputDelta | None:
        self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs:
            self._prompt_logprobs.extend(output.prompt_logprobs)
        if output.vectors is not None:
            self.hidden_states += output.vectors
        if output.tokens:
            self._record_latency(len(output.tokens))
        if self.prompt.score_only:
            return self._score_output(output)
        logprobs: Iterable[TokenLogprob | None] = output.logprobs or repeat(None, len(output.tokens))
        self._pending.extend(zip(output.tokens, logprobs, strict=True))
        self._received += len(output.tokens)
        return self._release(output)

    def _record_latency(self, tokens: int) -> None:
        now = time.perf_counter()
        if self._last_token_at == 0.0:
            self._metrics.first_token(now - self._arrival)
            self._observers.first_token(self._name, now - self._arrival)
        else:
            self._metrics.next_tokens(now - self._last_token_at, tokens)
        self._last_token_at = now

    def _release(self, output: Output) -> OutputDelta | None:
        hide_stop_token = output.stop_token is not None and not self.prompt.sampling.include_stop_str_in_output
        delta = self._detokenizer.push(
            output.tokens[:-1] if hide_stop_token else output.tokens, output.finish is not None
        )
        used = delta.tokens_used
        if delta.stop_string is not None:
            self.finish, self.matched = FinishReason.STOP, delta.stop_string
            self._engine.finish(self._name)
        elif output.finish is not None:
            self.finish, self.matched, used = output.finish, output.stop_token, self._received
        released = [self._pending.popleft() for _ in range(used - self.completion_tokens)]
        self.completion_tokens = used
        if not (delta.text or released or self.finish):
            return None
        return self._delta(delta.text, released)

    def _score_output(self, output: Output) -> OutputDelta | None:
        if output.finish is None:
            return None
        self.finish = FinishReason.ABORT if output.finish is FinishReason.ABORT else FinishReason.LENGTH
        return self._delta("", [])

    def _delta(self, text: str, released: list[tuple[int, TokenLogprob | None]]) -> OutputDelta:
        prompt_logprobs = None
        if not self._sent_prompt_logprobs:
            prompt_logprobs, self._sent_prompt_logprobs = self._prompt_logprobs, True
        return OutputDelta(
            sequence=self,
            text=text,
            tokens=[token for token, _ in released],
            logprobs=[logprob for _, logprob in released if logprob is not None],
            prompt_logprobs=prompt_logprobs,
            finish=self.finish,
            matched=self.matched,
        )


@dataclass(slots=True)
class CompletedSequence:
    """A sequence with its complete output."""

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

    def add(self, delta: OutputDelta) -> None:
        self.parts.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; a prompt counts once for all of its outputs."""

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


class RequestGroup:
    """The sequences of one client request, ordered by prompt, as in the response."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences

    def usage(self) -> Usage:
        first = [sequence for sequence in self.sequences if sequence.output_index == 0]
        return Usage(
            prompt_tokens=sum(len(sequence.prompt.tokens) for sequence in first),
            completion_tokens=sum(sequence.completion_tokens for sequence in self.sequences),
            cached_tokens=sum(sequence.cached_tokens for sequence in first),
        )

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Yield the deltas of all sequences as they arrive. The first failure ends all of them and is raised."""
        if len(self.sequences) == 1:
            async with aclosing(self.sequences[0].deltas()) as deltas:
                async for delta in deltas:
                    yield delta
            return
        queue: asyncio.Queue[OutputDelta | BaseException | None] = asyncio.Queue()
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

    async def gather(self) -> list[CompletedSequence]:
        """Collect the complete sequences."""
        results = [CompletedSequence(sequence) for sequence in self.sequences]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                results[delta.sequence.index].add(delta)
        return results


async def _feed(sequence: Sequence, queue: asyncio.Queue[OutputDelta | BaseException | None]) -> None:
    try:
        async for delta in sequence.deltas():
            queue.put_nowait(delta)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        queue.put_nowait(error)  # raised by the reader of the queue
        raise
    queue.put_nowait(None)
