"""Turns client requests into tokenized prompts for the engine, or refuses them.

Owns every check that needs the model (vocabulary, context length, KV pool, number of sequences), tokenization without
blocking the event loop, default lengths, and seeds. Must not know HTTP or the format of any protocol.
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
from srv.types import SamplingOptions, SamplingParams

INLINE_CHARACTERS = 4096  # encoded on the event loop; longer text is encoded in a thread
INLINE_TOKENS = 4096
# Of a text with more characters per available token than this, a prefix is encoded first: most languages have 2 to 6
# characters per token, so the prefix alone has too many tokens, and the text is refused without encoding the rest.
PROBE_CHARACTERS_PER_TOKEN = 8
PROBE_MARGIN = 1.25  # the prefix must exceed the limit by this factor, because its last token may be split
TEXT_THREADS = 2
# Unicode composition shrinks UTF-8 text by at most this factor (three Hangul letters become one syllable), so a prompt
# with more bytes than this times the bytes of the tokens cannot fit, whatever the normalizer of the tokenizer does.
NORMALIZATION_FACTOR = 3
GREEDY_BELOW = 1e-5  # smaller temperatures overflow float32 logits, so the limit, greedy sampling, is used

T = TypeVar("T")
Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """One prompt, from which n sequences are generated. `seeds` has n entries.

    `sampling` is what the client requested, `params` what the engine gets, with one of the seeds for each sequence.
    `params.max_tokens` is at least 1; `score_only` is set if the client requested 0 tokens.
    """

    text: str | None  # the prompt as text, if it came as text
    tokens: list[int]
    sampling: Sampling
    params: SamplingParams
    seeds: tuple[int, ...]
    score_only: bool


def read_prompts(value: object, param: str) -> tuple[list[Prompt], bool]:
    """The prompts of a request, and whether they are a batch. Raises RequestError."""
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
            f" it contains {_json_types(value)}",
            code="invalid_type",
            param=param,
        )
    if isinstance(value, list):
        raise RequestError(f"{param} = [] is refused: it has no tokens", code="empty_prompt", param=param)
    raise RequestError(
        f"{param} must be a string or an array, not {json_type(value)}", code="invalid_type", param=param
    )


def _json_types(value: list[object]) -> str:
    return " and ".join(sorted({json_type(item) for item in value}))


def _token_list(ids: list[object], param: str) -> list[int]:
    if set(map(type, ids)) - {int}:
        raise RequestError(f"{param} must contain only token ids (integers)", code="invalid_type", param=param)
    return ids  # type: ignore[return-value]


def seeds_for(seed: int, n: int) -> tuple[int, ...]:
    """One seed per sequence, derived from (seed, index). The first is `seed` itself."""
    derived = (
        int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "big") >> 1
        for index in range(1, n)
    )
    return (seed, *derived)


class RequestPreprocessor:
    """Checks and tokenizes requests for one model."""

    def __init__(self, settings: ServerSettings, text: TextProcessor) -> None:
        self._settings = settings
        generator = random.SystemRandom() if settings.random_seed is None else random.Random(settings.random_seed)
        self._random_bits = generator.getrandbits
        self._text = text
        self._executor = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="srv-text")
        max_bytes = settings.max_prompt_bytes
        if max_bytes is None:
            longest_token = max((len(text.token_bytes(token)) for token in range(text.vocab_size)), default=1)
            max_bytes = NORMALIZATION_FACTOR * settings.context_length * max(longest_token, 4)
        self.max_prompt_bytes = max_bytes

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[[], T], inline: bool) -> T:
        if inline:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self._settings.model_name:
            raise RequestError(
                f"model = {shorten(model)} is not served; the served model is {self._settings.model_name}",
                code="model_not_found",
                param="model",
                status=404,
            )

    def check_count(self, prompts: int, n: int, param: str) -> None:
        if prompts * n > self._settings.max_sequences:
            count = f"{prompts} prompts" if n == 1 else f"{prompts} prompts times n = {n} are {prompts * n} sequences"
            raise RequestError(
                f"{count}, the limit is {self._settings.max_sequences}; send several requests",
                code="too_many_sequences",
                param=param,
            )

    async def encode(self, text: str, add_special_tokens: bool, param: str, *, min_output: int | None = 1) -> list[int]:
        """Encode a text, in a thread if it is long.

        Raises RequestError if it is far too long; unless `min_output` is None, also if a prefix has too many tokens to
        leave `min_output` for the output.
        """
        # A character has one to four bytes, so the number of characters decides for most texts.
        decided = len(text) * 4 <= self.max_prompt_bytes or len(text) > self.max_prompt_bytes
        size = len(text) if decided else len(text.encode())
        if size > self.max_prompt_bytes:
            raise RequestError(
                f"{param} has at least {size} bytes of text; the model's context of {self._settings.context_length}"
                f" tokens has at most {self.max_prompt_bytes}; shorten it",
                code="context_length_exceeded",
                param=param,
            )
        if min_output is not None:
            await self._refuse_by_prefix(text, param, min_output)
        return await self._run(lambda: self._text.encode(text, add_special_tokens), len(text) <= INLINE_CHARACTERS)

    async def _refuse_by_prefix(self, text: str, param: str, min_output: int) -> None:
        """Refuse a text whose prefix alone has too many tokens, at a cost that does not depend on its length."""
        available = self._settings.request_token_limit
        if len(text) <= max(PROBE_CHARACTERS_PER_TOKEN * available, INLINE_CHARACTERS):
            return
        prefix = text[: PROBE_CHARACTERS_PER_TOKEN * available]
        count = len(await self._run(lambda: self._text.encode(prefix, False), inline=False))
        if count > PROBE_MARGIN * available:
            self._check_prompt_length(int(count / PROBE_MARGIN), param, min_output, "over ")

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return await self._run(lambda: self._text.decode(tokens, skip_special_tokens), len(tokens) <= INLINE_TOKENS)

    async def render(
        self, messages: list[dict[str, object]], add_generation_prompt: bool, extra: dict[str, object]
    ) -> str:
        """Render the prompt text of a conversation."""
        if not self._text.has_chat_template:
            raise RequestError(
                "the model has no chat template; use /v1/completions, or start the server with --chat-template",
                code="no_chat_template",
                param="messages",
            )
        size = sum(len(content) for message in messages if isinstance(content := message["content"], str))
        return await self._run(
            lambda: self._text.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **extra),
            size <= INLINE_CHARACTERS and len(messages) <= 64,
        )

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises RequestError for a token id outside the vocabulary."""
        if tokens and (min(tokens) < 0 or max(tokens) >= self._settings.vocab_size):
            bad = next(token for token in tokens if not 0 <= token < self._settings.vocab_size)
            raise RequestError(
                f"{param} contains token id {shorten(bad)}; the vocabulary is 0 to {self._settings.vocab_size - 1}",
                code="invalid_token_id",
                param=param,
            )

    async def tokenize(self, prompt: Prompt, *, param: str, special: bool, min_output: int = 1) -> list[int]:
        """The checked token ids of a prompt that leaves `min_output` tokens for the output. Raises RequestError."""
        tokens = await self.encode(prompt, special, param, min_output=min_output) if isinstance(prompt, str) else prompt
        self._check_prompt_length(len(tokens), param, min_output)
        if not isinstance(prompt, str):
            self.check_tokens(tokens, param)
        return tokens

    async def prepare(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        param: str,
        default_max_tokens: int | None,
        special: bool = True,
        field: Callable[[str], str] = str,
    ) -> TokenizedPrompt:
        """Tokenize and check one prompt. Raises RequestError.

        default_max_tokens: None: as many as fit. param: the request's field with the prompt. field(name): that with the
        field `name` of `Sampling`, by default of the same name.
        """
        tokens = await self.tokenize(prompt, param=param, special=special)
        available = self._settings.request_token_limit - len(tokens)
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = available if default_max_tokens is None else min(available, default_max_tokens)
            max_tokens = max(max_tokens, min(sampling.min_tokens, available))
        self._check_lengths(len(tokens), max_tokens, available, sampling, field)
        params = self._params(sampling, max(1, max_tokens), field)
        self._check_stop(sampling, field("stop"))
        return TokenizedPrompt(
            text=prompt if isinstance(prompt, str) else None,
            tokens=tokens,
            sampling=sampling,
            params=params,
            seeds=seeds_for(self._random_bits(63) if sampling.seed is None else sampling.seed, sampling.n),
            score_only=max_tokens == 0,
        )

    def _check_prompt_length(self, prompt_tokens: int, param: str, min_output: int, qualifier: str = "") -> None:
        settings = self._settings
        if prompt_tokens == 0:
            raise RequestError(
                f"{param} is empty; send at least one token",
                code="empty_prompt",
                param=param,
            )
        if prompt_tokens + min_output > settings.request_token_limit:
            limit, code = self._limit()
            problem = f"which leaves none for the output: {limit}" if min_output else f"but {limit}"
            raise RequestError(
                f"{param} has {qualifier}{prompt_tokens} tokens, {problem}; shorten it",
                code=code,
                param=param,
            )

    def _limit(self) -> tuple[str, str]:
        settings = self._settings
        if settings.context_length <= settings.max_request_tokens:
            return f"the model's context is {settings.context_length} tokens", "context_length_exceeded"
        return f"the KV pool holds {settings.max_request_tokens} tokens per request", "request_too_large"

    def _check_lengths(
        self, prompt_tokens: int, max_tokens: int, available: int, sampling: Sampling, field: Callable[[str], str]
    ) -> None:
        max_name, min_name = field("max_tokens"), field("min_tokens")
        if max_tokens > available:
            limit, code = self._limit()
            raise RequestError(
                f"{max_name} = {max_tokens} is refused: with the prompt of {prompt_tokens} tokens it is"
                f" {prompt_tokens + max_tokens}, but {limit}; request at most {available}",
                code=code,
                param=max_name,
            )
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                f"{min_name} = {sampling.min_tokens} is refused: it is greater than {max_name} = {max_tokens}",
                code="invalid_value",
                param=min_name,
            )

    def _check_stop(self, sampling: Sampling, param: str) -> None:
        count, limit = len(sampling.stop), self._settings.max_stop_strings
        if count > limit:
            raise RequestError(
                f"{param} has {count} strings, the limit is {limit}; remove some",
                code="invalid_value",
                param=param,
            )

    def _params(self, sampling: Sampling, max_tokens: int, field: Callable[[str], str]) -> SamplingParams:
        self.check_tokens(sampling.stop_token_ids, field("stop_token_ids"))
        self.check_tokens([token for token, _ in sampling.logit_bias], field("logit_bias"))
        options = {name: getattr(sampling, name) for name in SamplingOptions.__struct_fields__}
        if sampling.temperature < GREEDY_BELOW:
            options["temperature"] = 0.0
        if sampling.top_k >= self._settings.vocab_size:
            options["top_k"] = -1  # it keeps all tokens
        return SamplingParams(max_tokens=max_tokens, **options)
