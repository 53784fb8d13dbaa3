"""Turns what a client asked for into work for the engine, or into a refusal.

Owns every check that needs the model: vocabulary, context, pages, number of sequences; tokenizing without
stalling the event loop; default lengths; seeds. Must not know HTTP or the shape of any protocol.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from srv.errors import RequestError
from srv.server.fields import json_type, shorten
from srv.server.sampling_fields import Sampling
from srv.server.settings import ServerSettings
from srv.server.text.processor import TextProcessor
from srv.types import SamplingParams

INLINE_CHARACTERS = 4096  # encoded on the event loop; longer text goes to a thread
INLINE_TOKENS = 4096
# A text of more than this many characters for each token that a request may have is looked at in part first: most
# languages have 2 to 6 a token, so the part alone has too many, and the rest need not be encoded to refuse it.
PROBE_CHARACTERS = 8
PROBE_MARGIN = 1.25  # the part must have so many times the tokens: where it ends, a token may be cut in pieces
TEXT_THREADS = 2
# Unicode composition shrinks text at most threefold in UTF-8 (a Hangul syllable written as three letters),
# so a longer prompt than this many times the tokens' bytes cannot fit, whatever the tokenizer normalizes.
NORMALIZATION_FACTOR = 3
GREEDY_BELOW = 1e-5  # logits divided by less than this leave float32's range: the limit, greedy, is taken

T = TypeVar("T")
Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """One prompt and the n sequences to make from it. `seeds` has n entries.

    `params.max_tokens` is at least 1; `score_only` says that the client asked for 0 tokens.
    """

    text: str | None  # the prompt as text, if it came as text
    tokens: list[int]
    params: SamplingParams
    seeds: tuple[int, ...]
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    score_only: bool


def read_prompts(value: object, param: str) -> tuple[list[Prompt], bool]:
    """The prompts of a request, and whether they came as a batch. Raises RequestError."""
    if isinstance(value, str):
        return [value], False
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return [value], False
        if kinds == {str}:
            return list(value), True
        if kinds == {list}:
            return [_token_list(ids, f"{param}[{index}]") for index, ids in enumerate(value)], True
        raise RequestError(
            f"{param} must be a string, an array of strings, of token ids (integers), or of arrays of token ids;"
            f" it holds {_kinds(value)}",
            code="invalid_type",
            param=param,
        )
    if isinstance(value, list):
        raise RequestError(f"{param} = [] is refused: there is nothing to continue", code="empty_prompt", param=param)
    raise RequestError(
        f"{param} must be a string or an array, not {json_type(value)}", code="invalid_type", param=param
    )


def _kinds(value: list[object]) -> str:
    return " and ".join(sorted({json_type(one) for one in value}))


def _token_list(ids: list[object], param: str) -> list[int]:
    if set(map(type, ids)) - {int}:
        raise RequestError(f"{param} must hold token ids (integers) only", code="invalid_type", param=param)
    return ids  # type: ignore[return-value]


def seeds_for(seed: int, n: int) -> tuple[int, ...]:
    """One seed a sequence, derived from (seed, index). The first is `seed` itself."""
    derived = (
        int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "big") >> 1
        for index in range(1, n)
    )
    return (seed, *derived)


class RequestPreprocessor:
    """Checks and tokenizes requests for one model."""

    def __init__(self, settings: ServerSettings, text: TextProcessor) -> None:
        self._settings = settings
        chance = random.SystemRandom() if settings.random_seed is None else random.Random(settings.random_seed)
        self._draw = chance.getrandbits
        self._text = text
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="srv-text")
        longest = settings.max_prompt_bytes
        if longest is None:
            longest_token = max((len(text.token_bytes(token)) for token in range(text.vocab_size)), default=1)
            longest = NORMALIZATION_FACTOR * settings.context_length * max(longest_token, 4)
        self.max_prompt_bytes = longest

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compute(self, function: Callable[[], T], inline: bool) -> T:
        if inline:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self._settings.model_name:
            raise RequestError(
                f"model = {shorten(model)} is not served here; the model is {self._settings.model_name}",
                code="model_not_found",
                param="model",
                status=404,
            )

    def check_count(self, prompts: int, n: int, param: str) -> None:
        if prompts * n > self._settings.max_sequences:
            raise RequestError(
                f"{prompts} prompts times n = {n} are {prompts * n} outputs, the limit is"
                f" {self._settings.max_sequences}; send several requests",
                code="too_many_sequences",
                param=param,
            )

    async def encode(self, text: str, add_special_tokens: bool, param: str, *, to_run: bool = True) -> list[int]:
        """Token ids of a text, made in a thread if it is long.

        Raises RequestError if it is hopelessly long; with `to_run`, as soon as that is sure for a prompt.
        """
        # A character has one to four bytes, so the cheap tests decide for most texts.
        sure = len(text) * 4 <= self.max_prompt_bytes or len(text) > self.max_prompt_bytes
        size = len(text) if sure else len(text.encode())
        if size > self.max_prompt_bytes:
            raise RequestError(
                f"{param} has at least {size} bytes of text; the model's context of {self._settings.context_length}"
                f" tokens holds at most {self.max_prompt_bytes}; shorten it",
                code="context_length_exceeded",
                param=param,
            )
        if to_run:
            await self._refuse_by_part(text, param)
        return await self._compute(lambda: self._text.encode(text, add_special_tokens), len(text) <= INLINE_CHARACTERS)

    async def _refuse_by_part(self, text: str, param: str) -> None:
        """Refuse a text whose beginning alone has too many tokens, at a cost that its length cannot raise."""
        room = self._settings.max_total_tokens
        if len(text) <= max(PROBE_CHARACTERS * room, INLINE_CHARACTERS):
            return
        part = text[: PROBE_CHARACTERS * room]
        found = len(await self._compute(lambda: self._text.encode(part, False), inline=False))
        if found > PROBE_MARGIN * room:
            self._room_for(int(found / PROBE_MARGIN), param, "over ")

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return await self._compute(lambda: self._text.decode(tokens, skip_special_tokens), len(tokens) <= INLINE_TOKENS)

    async def render(
        self, messages: list[dict[str, object]], add_generation_prompt: bool, extra: dict[str, object]
    ) -> str:
        """The prompt text of a conversation."""
        if not self._text.has_chat_template:
            raise RequestError(
                "the model has no chat template; use /v1/completions, or start the server with --chat-template",
                code="no_chat_template",
                param="messages",
            )
        size = sum(len(content) for message in messages if isinstance(content := message["content"], str))
        return await self._compute(
            lambda: self._text.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **extra),
            size <= INLINE_CHARACTERS and len(messages) <= 64,
        )

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises RequestError for a token id outside the vocabulary."""
        if tokens and (min(tokens) < 0 or max(tokens) >= self._settings.vocab_size):
            bad = next(token for token in tokens if not 0 <= token < self._settings.vocab_size)
            raise RequestError(
                f"{param} holds token id {shorten(bad)}; the vocabulary is 0 to {self._settings.vocab_size - 1}",
                code="invalid_token_id",
                param=param,
            )

    async def prepare(
        self, prompt: Prompt, sampling: Sampling, *, param: str, default_max_tokens: int | None, special: bool = True
    ) -> TokenizedPrompt:
        """The work of one prompt. `default_max_tokens` None: as many as fit. Raises RequestError."""
        tokens = await self.encode(prompt, special, param) if isinstance(prompt, str) else prompt
        room = self._room_for(len(tokens), param)
        if not isinstance(prompt, str):
            self.check_tokens(tokens, param)
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = room if default_max_tokens is None else min(room, default_max_tokens)
            max_tokens = max(max_tokens, min(sampling.min_tokens, room))
        self._check_lengths(len(tokens), max_tokens, room, sampling)
        return TokenizedPrompt(
            text=prompt if isinstance(prompt, str) else None,
            tokens=tokens,
            params=self._params(sampling, max(1, max_tokens)),
            seeds=seeds_for(self._draw(63) if sampling.seed is None else sampling.seed, sampling.n),
            stop=self._stop(sampling),
            include_stop=sampling.include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
            score_only=max_tokens == 0,
        )

    def _room_for(self, prompt_tokens: int, param: str, about: str = "") -> int:
        settings = self._settings
        if prompt_tokens == 0:
            raise RequestError(
                f"{param} is empty: there is nothing to continue; send at least one token",
                code="empty_prompt",
                param=param,
            )
        if prompt_tokens >= settings.max_total_tokens:
            limit, code = self._limit()
            raise RequestError(
                f"{param} has {about}{prompt_tokens} tokens and leaves no room for output: {limit}; shorten it",
                code=code,
                param=param,
            )
        return settings.max_total_tokens - prompt_tokens

    def _limit(self) -> tuple[str, str]:
        settings = self._settings
        if settings.context_length <= settings.max_request_tokens:
            return f"the model's context is {settings.context_length} tokens", "context_length_exceeded"
        return f"the KV pool holds {settings.max_request_tokens} tokens of one request", "request_too_large"

    def _check_lengths(self, prompt_tokens: int, max_tokens: int, room: int, sampling: Sampling) -> None:
        if max_tokens > room:
            limit, code = self._limit()
            raise RequestError(
                f"max_tokens = {max_tokens} is refused: with a prompt of {prompt_tokens} tokens it makes"
                f" {prompt_tokens + max_tokens}, and {limit}; ask for at most {room}",
                code=code,
                param="max_tokens",
            )
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens = {sampling.min_tokens} is refused: it is more than max_tokens = {max_tokens}",
                code="invalid_value",
                param="min_tokens",
            )

    def _stop(self, sampling: Sampling) -> tuple[str, ...]:
        if len(sampling.stop) > self._settings.max_stop_strings:
            raise RequestError(
                f"stop has {len(sampling.stop)} strings, the limit is {self._settings.max_stop_strings}; drop some",
                code="invalid_value",
                param="stop",
            )
        return sampling.stop

    def _params(self, sampling: Sampling, max_tokens: int) -> SamplingParams:
        self.check_tokens(sampling.stop_token_ids, "stop_token_ids")
        self.check_tokens([token for token, _ in sampling.logit_bias], "logit_bias")
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=0.0 if sampling.temperature < GREEDY_BELOW else float(sampling.temperature),
            top_k=-1 if sampling.top_k >= self._settings.vocab_size else sampling.top_k,  # it keeps all
            top_p=float(sampling.top_p),
            min_p=float(sampling.min_p),
            repetition_penalty=float(sampling.repetition_penalty),
            frequency_penalty=float(sampling.frequency_penalty),
            presence_penalty=float(sampling.presence_penalty),
            logit_bias=sampling.logit_bias,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            prompt_logprobs_start=sampling.prompt_logprobs_start,
        )
