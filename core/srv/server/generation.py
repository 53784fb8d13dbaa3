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
from dataclasses import dataclass, field, replace
from itertools import repeat

import msgspec

from srv.errors import EngineDead, RequestError
from srv.io.messages import Output
from srv.server.client import EngineClient
from srv.server.observe.metrics import Metrics
from srv.server.observe.observers import Observers
from srv.server.request.prompt_request import TokenizedPrompt
from srv.server.text.processor import TextProcessor
from srv.types import FinishReason, RequestSpec, TokenLogprob


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New output of one sequence. `prompt_logprobs` is set on the first delta only.

    `finish` is set on the last delta; `matched` is the stop string, regular expression or token id that ended it.
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

    `group` and `owner`: as in `RequestSpec`. `cache`: begins the namespace of the prefix cache. `arrival`: of the
    request, a time of `time.perf_counter`.

    `reasoning_tokens`: how many of `completion_tokens` are reasoning, if a protocol looks for it.
    `hidden_states`: float32, little-endian, of the positions computed so far; empty if they were not requested.
    `leader`: another sequence of the same prompt, which alone computes the log-probabilities of the prompt.
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
        group: str,
        owner: str,
        cache: str,
        index: int,
        prompt_index: int,
        output_index: int,
        arrival: float,
        aborted: Callable[[], bool],
        leader: Sequence | None = None,
    ) -> None:
        self._leader, self._scored = leader, asyncio.Event()
        self._aborted, self._observers, self._text = aborted, observers, text
        self.index, self.prompt_index, self.output_index = index, prompt_index, output_index
        self.prompt = prompt
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None
        self.hidden_states = bytearray()
        self.finish: FinishReason | None = None
        self.matched: str | int | None = None
        self._engine, self._name, self.arrival = engine, name, arrival
        self._record = observers.begin(name, arrival, len(prompt.seeds), output_index)
        self._metrics = metrics.of(self._record.labels)
        self._group, self._owner, self._cache = group, owner, cache
        sampling = prompt.sampling
        self._detokenizer = text.detokenizer(
            prompt.tokens,
            sampling.stop,
            sampling.skip_special_tokens,
            sampling.include_stop_str_in_output,
            prompt.markers,
            prompt.stop_regex,
        )
        self._pending: deque[tuple[int, TokenLogprob | None]] = deque()
        self._prompt_logprobs: list[TokenLogprob] = []
        self._sent_prompt_logprobs = prompt.params.prompt_logprobs is None
        self._received = 0
        self._last_token_at = 0.0
        grammar = prompt.grammar
        self._check = None if grammar is None or grammar.check is None else grammar.check()
        self.structured_output_valid: bool | None = None  # None: it does not end in a grammar, or has not ended

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Yield the deltas, the last one with `finish` set. Raises RequestError or EngineDead.

        Closing the iterator early aborts the sequence at the engine.
        """
        if self._leader is not None:
            await self._leader._scored.wait()
        if self._aborted():  # after its admission, before it was sent to the engine
            self.finish = FinishReason.ABORT
            self._end(FinishReason.ABORT)
            yield self._delta("", [])
            return
        params = msgspec.structs.replace(self.prompt.params, seed=self.prompt.seeds[self.output_index])
        if self._leader is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None, prompt_logprobs_start=0)
            self._prompt_logprobs = self._leader._prompt_logprobs
        tokens = tuple(self.prompt.tokens)
        spec = RequestSpec(
            id=self._name,
            tokens=tokens,
            params=params,
            namespace=self._cache + self.prompt.namespace,
            group=self._group,
            owner=self._owner,
            grammar=None if self.prompt.grammar is None else self.prompt.grammar.grammar,
        )
        reason = FinishReason.ABORT  # unless the engine reports another
        self._record.spec = spec
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
            self._end(reason)

    def _end(self, reason: FinishReason) -> None:
        self._scored.set()
        record = self._record
        record.ended, record.reason = time.perf_counter(), reason
        record.cached_tokens, record.completion_tokens = self.cached_tokens, self.completion_tokens
        self._metrics.ended(record)
        self._observers.ended(record)

    def _process_output(self, output: Output) -> OutputDelta | None:
        self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs:
            self._prompt_logprobs.extend(output.prompt_logprobs)
        if output.vectors is not None:
            self.hidden_states += output.vectors
        if output.tokens:
            self._scored.set()  # the whole prompt is computed
            self._record_latency(output)
        if self.prompt.score_only:
            return self._score_output(output)
        logprobs: Iterable[TokenLogprob | None] = output.logprobs or repeat(None, len(output.tokens))
        self._pending.extend(zip(output.tokens, logprobs, strict=True))
        self._received += len(output.tokens)
        return self._release(output)

    def _record_latency(self, output: Output) -> None:
        now = time.perf_counter()
        if self._last_token_at == 0.0:
            self._record.scheduled, self._record.first_token = output.scheduled_at, now
            self._metrics.first_token(now - self.arrival)
            self._observers.first_token(self._name, now - self.arrival)
        else:
            self._metrics.next_tokens(now - self._last_token_at, len(output.tokens))
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
        if self.prompt.grammar is not None:
            self._validate(text)
        if self._record.texts is not None:
            self._record.texts.append(text)
        return OutputDelta(
            sequence=self,
            text=text,
            tokens=[token for token, _ in released],
            logprobs=[logprob for _, logprob in released if logprob is not None],
            prompt_logprobs=prompt_logprobs,
            finish=self.finish,
            matched=self.matched,
        )

    def _validate(self, text: str) -> None:
        """Check the text that the client gets, and count the answer when it ends."""
        if self.prompt.sampling.include_stop_str_in_output and isinstance(self.matched, int):
            text = text.removesuffix(self._text.token_text(self.matched))  # the end token is not part of the answer
        if self._check is not None:
            self._check.feed(text)
        if self.finish in (FinishReason.STOP, FinishReason.LENGTH):
            ended = self.finish is FinishReason.STOP and isinstance(self.matched, int)
            check = None if self._check is None or self._check.given_up else self._check
            self.structured_output_valid = ended if check is None else check.valid
            self._metrics.structured_output_ended(self.structured_output_valid)


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
    """Token counts of a request; a prompt counts once for all of its outputs.

    `reasoning_tokens`: those of `completion_tokens` that are reasoning; None if nothing looked for it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: not reported
    reasoning_tokens: int | None = None

    def openai(self) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class RequestGroup:
    """The sequences of one client request, ordered by prompt, as in the response.

    interval: tokens per delta, except the first and the last one of a sequence. cache_report: whether the usage says
    how many prompt tokens the prefix cache had.
    """

    def __init__(self, sequences: list[Sequence], interval: int = 1, cache_report: bool = True) -> None:
        self.sequences = sequences
        self._interval, self._cache_report = interval, cache_report

    def usage(self) -> Usage:
        first = [sequence for sequence in self.sequences if sequence.output_index == 0]
        thought = [sequence.reasoning_tokens for sequence in self.sequences if sequence.reasoning_tokens is not None]
        return Usage(
            prompt_tokens=sum(len(sequence.prompt.tokens) for sequence in first),
            completion_tokens=sum(sequence.completion_tokens for sequence in self.sequences),
            cached_tokens=sum(sequence.cached_tokens for sequence in first) if self._cache_report else None,
            reasoning_tokens=sum(thought) if thought else None,
        )

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Yield the deltas of all sequences as they arrive. The first failure ends all of them and is raised."""
        if len(self.sequences) == 1:
            async with aclosing(_coalesced(self.sequences[0].deltas(), self._interval)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        queue: asyncio.Queue[OutputDelta | BaseException | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(_feed(_coalesced(sequence.deltas(), self._interval), queue))
            for sequence in self.sequences
        ]
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


async def _feed(
    deltas: AsyncGenerator[OutputDelta, None], queue: asyncio.Queue[OutputDelta | BaseException | None]
) -> None:
    try:
        async for delta in deltas:
            queue.put_nowait(delta)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        queue.put_nowait(error)  # raised by the reader of the queue
        raise
    queue.put_nowait(None)


def _coalesced(deltas: AsyncGenerator[OutputDelta, None], interval: int) -> AsyncGenerator[OutputDelta, None]:
    """The same output in deltas of at least `interval` tokens (`--stream-interval`).

    The first delta with tokens, and the last, do not wait. An error follows what was produced before it.
    """
    return deltas if interval == 1 else _in_larger_deltas(deltas, interval)


async def _in_larger_deltas(
    deltas: AsyncGenerator[OutputDelta, None], interval: int
) -> AsyncGenerator[OutputDelta, None]:
    pending: OutputDelta | None = None
    missing = 1
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                pending = delta if pending is None else _merged(pending, delta)
                if len(pending.tokens) >= missing or pending.finish is not None:
                    ready, pending, missing = pending, None, interval
                    yield ready
        except (EngineDead, RequestError):
            if pending is not None:
                yield pending
            raise


def _merged(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    return replace(
        second,
        text=first.text + second.text,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
    )
