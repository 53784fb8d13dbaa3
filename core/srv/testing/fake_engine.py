"""A fake engine and a fake tokenizer, without a model, for tests of the HTTP server in one event loop.

`FakeEngine` is a `Channel` that answers itself. It implements the message protocol (an ABORT output for each aborted
request, no output after Finish, Flushed refused while requests are running) and generates the tokens of a script.
`ByteTokenizer` is a tokenizer with one token per byte and a few special tokens.
"""

from __future__ import annotations

import asyncio
import codecs
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from srv.commands import Answer
from srv.errors import EngineDead, RequestError
from srv.io.messages import (
    Abort,
    Control,
    Controlled,
    Drain,
    Drained,
    Finish,
    FlushCache,
    Flushed,
    FromEngine,
    GetStats,
    Output,
    Outputs,
    Pause,
    Paused,
    Stats,
    ToEngine,
)
from srv.io.step_tokens import BOUNDS
from srv.server.text.detokenize import IncrementalDetokenizer
from srv.server.text.processor import Detokenizer, EncodedPair, SpecialTokenAffixes, TextDelta
from srv.server.text.stop_regex import StopRegex
from srv.server.text.tokenizers.codec import ByteCodec
from srv.types import FinishReason, PooledOutput, Pooling, PoolingParams, RequestSpec, TokenLogprob, Vocabulary

BOS, EOS, SPECIAL_TOKENS = 256, 257, 4
PAGE_SIZE, PAGES = 16, 1000
HIDDEN = 4  # elements of an embedding
LABELS = 2  # of its classification head
PEAK_BYTES = 3000  # what its steps have needed at most
DEFAULT_OUTPUT = b"The quick brown fox jumps over the lazy dog. "

Script = Callable[[RequestSpec], Sequence[int]]


def echo_forever(message: RequestSpec) -> Sequence[int]:
    """The default script: a sentence, repeated up to `max_tokens`."""
    count = 0 if isinstance(message.params, PoolingParams) else message.params.max_tokens
    return (DEFAULT_OUTPUT * (count // len(DEFAULT_OUTPUT) + 1))[:count]


@dataclass(slots=True)
class _Running:
    message: RequestSpec
    script: Sequence[int]
    generated: int = 0


@dataclass
class FakeEngine:
    """`script` chooses the tokens of a request; while `hold` is set, requests wait without output.

    `step_seconds`: pause between steps. `tokens_per_step`: tokens per Output. `request_error`: if set, the
    (code, message) with which every request ends. `inert`: what it reports as inert. `received`: all messages received.
    """

    script: Script = echo_forever
    step_seconds: float = 0.0
    tokens_per_step: int = 1
    hold: bool = False
    cached_tokens: int = 0
    request_error: tuple[str, str] | None = None
    inert: dict[str, str] = field(default_factory=dict)
    received: list[ToEngine] = field(default_factory=list)
    running: dict[str, _Running] = field(default_factory=dict)
    _outbox: asyncio.Queue[FromEngine | EngineDead] = field(default_factory=asyncio.Queue)
    _task: asyncio.Task[None] | None = None
    _counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("prompt", "generated", "done", "aborted"), 0)
    )

    # ---- channel

    async def send(self, message: ToEngine) -> None:
        self.received.append(message)
        match message:
            case RequestSpec():
                self.running[message.id] = _Running(message, self.script(message))
                self._counts["prompt"] += len(message.tokens)
                if self._task is None or self._task.done():
                    self._task = asyncio.create_task(self._work())
            case Abort(requests):
                self._abort(list(self.running) if requests is None else requests)
            case Finish(request):
                self.running.pop(request, None)
                self._counts["done"] += 1
            case FlushCache(call):
                self._outbox.put_nowait(Flushed(call, not self.running, "requests are running" if self.running else ""))
            case GetStats(call):
                self._outbox.put_nowait(self.stats(call))
            case Control(call):
                self._outbox.put_nowait(Controlled(call, [Answer(peak_bytes=PEAK_BYTES)]))
            case Pause(call, paused):
                self.hold = paused
                self._outbox.put_nowait(Paused(call, paused))
            case Drain(seconds):
                asyncio.get_running_loop().call_later(seconds, self._drained)

    async def receive(self) -> FromEngine:
        message = await self._outbox.get()
        if isinstance(message, EngineDead):
            raise message
        return message

    def die(self, reason: str = "killed by signal 9") -> None:
        """Behave like an engine process that was killed."""
        self.running.clear()
        self._outbox.put_nowait(EngineDead(reason))

    # ---- steps

    async def _work(self) -> None:
        while self.running:
            await asyncio.sleep(self.step_seconds)
            if not self.hold and (outputs := [self._step(running) for running in list(self.running.values())]):
                self._outbox.put_nowait(Outputs(outputs))

    def _step(self, running: _Running) -> Output:
        request, params = running.message.id, running.message.params
        if self.request_error is not None:
            del self.running[request]
            return Output(request, [], FinishReason.ERROR, error=self.request_error)
        if isinstance(params, PoolingParams):
            del self.running[request]
            self._counts["done"] += 1
            vector = fake_vector(running.message.tokens, params)
            return Output(request, [], FinishReason.STOP, cached_tokens=self.cached_tokens, vectors=vector)
        first = running.generated == 0
        tokens = list(running.script[running.generated : running.generated + self.tokens_per_step])
        tokens = tokens[: params.max_tokens - running.generated]
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        end = next((index for index, token in enumerate(tokens) if token in ends), None)
        finish, stop_token = None, None
        if end is not None:
            tokens, finish, stop_token = tokens[: end + 1], FinishReason.STOP, tokens[end]
        running.generated += len(tokens)
        self._counts["generated"] += len(tokens)
        if finish is None and (running.generated >= params.max_tokens or running.generated >= len(running.script)):
            finish = FinishReason.LENGTH
        if finish is not None:
            del self.running[request]
            self._counts["done"] += 1
        prompt = running.message.tokens
        before = running.script[running.generated - len(tokens) - 1 : running.generated - 1]
        computed = [*prompt, *tokens[:-1]] if first else before  # the last token is an input of the next step
        scored = prompt[max(1, params.prompt_logprobs_start) :]
        send_prompt_logprobs, token_ids = first and params.prompt_logprobs is not None, params.logprob_token_ids
        return Output(
            request,
            tokens,
            finish,
            stop_token,
            [fake_logprob(token, params.logprobs, token_ids) for token in tokens]
            if params.logprobs is not None
            else None,
            [fake_logprob(token, params.prompt_logprobs or 0, token_ids) for token in scored]
            if send_prompt_logprobs
            else None,
            self.cached_tokens,
            vectors=fake_hidden_states(computed) if params.hidden_states else None,
        )

    def _abort(self, requests: Sequence[str]) -> None:
        ended = [request for request in requests if self.running.pop(request, None) is not None]
        self._counts["aborted"] += len(ended)
        if ended:
            self._outbox.put_nowait(Outputs([Output(request, [], FinishReason.ABORT) for request in ended]))

    def _drained(self) -> None:
        self._abort(list(self.running))
        self._outbox.put_nowait(Drained())

    def stats(self, call: int) -> Stats:
        pages_held = sum(1 + len(one.message.tokens) // PAGE_SIZE for one in self.running.values())
        return Stats(
            call=call,
            running=0 if self.hold else len(self.running),
            waiting=len(self.running) if self.hold else 0,
            pages_total=PAGES,
            pages_free=PAGES - pages_held,
            pages_cached=0,
            pages_held=pages_held,
            prompt_tokens=self._counts["prompt"],
            cached_tokens=0,
            generated_tokens=self._counts["generated"],
            steps=self._counts["generated"],
            retractions=0,
            finished=self._counts["done"],
            aborted=self._counts["aborted"],
            inert=self.inert,
            step_tokens=[self._counts["generated"], *[0] * len(BOUNDS)],
            computed_tokens=self._counts["generated"],
        )


def fake_vector(tokens: Sequence[int], params: PoolingParams) -> bytes:
    """A predictable embedding of HIDDEN elements: the sum of the tokens (mean) or the last one, plus 0, 1, ...

    The logit of a label is a hundredth of the number of tokens, plus its number; that of a token is its id.
    """
    if params.output is PooledOutput.LABELS:
        return struct.pack(f"<{LABELS}f", *(len(tokens) / 100 + label for label in range(LABELS)))
    if params.output is PooledOutput.TOKENS:
        return struct.pack(f"<{len(params.tokens)}f", *map(float, params.tokens))
    first = sum(tokens) if params.pooling is Pooling.MEAN else tokens[-1]
    elements = [float(first + index) for index in range(HIDDEN)][: params.dimensions]
    length = math.hypot(*elements) if params.normalize else 1.0
    return struct.pack(f"<{len(elements)}f", *(element / length for element in elements))


def fake_hidden_states(tokens: Sequence[int]) -> bytes:
    """HIDDEN elements per token: the token plus 0, 1, 2, ..."""
    elements = [float(token + index) for token in tokens for index in range(HIDDEN)]
    return struct.pack(f"<{len(elements)}f", *elements)


def fake_logprob(token: int, top: int, token_ids: Sequence[int] = ()) -> TokenLogprob:
    """A predictable log-probability: -token / 1000. Each alternative is 0.5 lower than the one before it."""
    best = -token / 1000
    others = tuple(((token + index) % 256, best - index / 2) for index in range(top))
    return TokenLogprob(token, best if token != EOS else -math.inf, 1, others, tuple(-one / 1000 for one in token_ids))


class ByteTokenizer:
    """A tokenizer with one token per byte, followed by BOS, EOS and two more special tokens.

    `adds_bos`: a text begins with BOS if special tokens are asked for.
    """

    vocab_size = 256 + SPECIAL_TOKENS
    has_tokenizer = True
    has_chat_template = True
    templates = ("{{ messages }}",)

    def __init__(self, adds_bos: bool = False) -> None:
        self._adds_bos = adds_bos
        self.affixes = SpecialTokenAffixes((BOS,) if adds_bos else ())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (self._adds_bos and add_special_tokens) + list(text.encode())

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], keep: int | None = None) -> list[EncodedPair]:
        """The first text, EOS, and the second one, whose tokens have type 1."""
        joined = [
            EncodedPair([*first.encode(), EOS, *second.encode()], len(first.encode()) + 1) for first, second in pairs
        ]
        return [pair._replace(tokens=pair.tokens[:keep]) for pair in joined]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [self.token_bytes(token) for token in ids if token < 256 or not skip_special_tokens]
        return b"".join(shown).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        if "fail" in variables:
            raise RequestError("the chat template refuses this conversation", code="chat_template_error")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + str(variables.get("preamble", "")) + ("assistant: " if add_generation_prompt else "")

    def apply_template_of_request(
        self,
        source: str,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        return source + self.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        skip_special_tokens: bool,
        include_stop: bool,
        keep: tuple[str, ...] = (),
        regex: StopRegex | None = None,
    ) -> Detokenizer:
        if regex is not None:
            special = frozenset(range(256, self.vocab_size))
            codec = ByteCodec(self.token_bytes, self.vocab_size, special, strip_space=False)
            stream = codec.stream(prompt_ids, skip_special_tokens)
            return IncrementalDetokenizer(stream, stop, include_stop, regex)
        return ByteDetokenizer(self, stop, skip_special_tokens, include_stop, keep)

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<%d>" % token

    def vocabulary(self) -> Vocabulary:
        tokens = [self.token_bytes(token) for token in range(self.vocab_size)]
        return Vocabulary(b"".join(tokens), list(map(len, tokens)), list(range(256, self.vocab_size)))

    def close(self) -> None:
        pass


class ByteDetokenizer:
    """Decodes the whole output on every call: slow, but simple enough to be obviously correct."""

    def __init__(
        self,
        text: ByteTokenizer,
        stop: Sequence[str],
        skip_special_tokens: bool,
        include_stop: bool,
        keep: tuple[str, ...] = (),
    ) -> None:
        self._text, self._stop, self._include = text, stop, include_stop
        special = range(256, text.vocab_size) if skip_special_tokens else ()
        self._hidden = {token for token in special if text.token_text(token) not in keep}
        self._tokens: list[int] = []
        self._sent = 0

    def push(self, tokens: Sequence[int], final: bool) -> TextDelta:
        self._tokens.extend(tokens)
        whole = self._decode(len(self._tokens), final)
        earliest = min(((place, stop) for stop in self._stop if (place := whole.find(stop)) >= 0), default=None)
        if earliest is not None:
            place, stop = earliest
            text = whole[: place + len(stop) if self._include else place]
            used = next(count for count in range(len(self._tokens) + 1) if self._decode(count, True).startswith(text))
            return TextDelta(self._unsent(text), stop, used)
        stop_length = 0 if final else self._stop_prefix_length(whole)
        text = whole[: len(whole) - stop_length]
        if final:
            return TextDelta(self._unsent(text), None, len(self._tokens))
        fitting = (count for count in range(len(self._tokens), -1, -1) if len(self._decode(count, False)) <= len(text))
        return TextDelta(self._unsent(text), None, next(fitting))

    def _decode(self, count: int, final: bool) -> str:
        shown = (self._text.token_bytes(token) for token in self._tokens[:count] if token not in self._hidden)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(shown), final)

    def _stop_prefix_length(self, text: str) -> int:
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )

    def _unsent(self, text: str) -> str:
        unsent, self._sent = text[self._sent :], max(self._sent, len(text))
        return unsent
