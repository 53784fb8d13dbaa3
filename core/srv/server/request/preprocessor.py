"""Turns client requests into tokenized prompts for the engine, or refuses them.

Owns every check that needs the model (vocabulary, context length, KV pool, number of sequences), tokenization without
blocking the event loop, default lengths, and seeds. Must not know HTTP or the format of any protocol.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from srv.errors import RequestError
from srv.server.request.bad_words import check_tokens_left, forms, sequences
from srv.server.request.custom_processors import check_processor
from srv.server.request.engine_params import engine_params
from srv.server.request.fields import shorten
from srv.server.request.grammar_rules import checked_grammar
from srv.server.request.grammars import CheckedGrammar, Grammars
from srv.server.request.prompt_request import PromptRequest, TokenizedPrompt
from srv.server.request.prompts import Prompt
from srv.server.request.sampling_fields import Sampling, with_defaults
from srv.server.request.seeds import seeds_for
from srv.server.request.stop_rules import check_stop_counts, compile_stops
from srv.server.settings import ServerSettings
from srv.server.text.processor import SpecialTokenAffixes, TextProcessor
from srv.server.text.stop_regex import StopRegex
from srv.server.text.token_ids import no_tokenizer
from srv.server.text.truncation import without_end
from srv.server.text.work import INLINE_COST, TextWork, is_little, split

# Of a text with more characters per available token than this, a prefix is encoded first: most languages have 2 to 6
# characters per token, so the prefix alone has too many tokens, and the text is refused without encoding the rest.
PROBE_CHARACTERS_PER_TOKEN = 8
PROBE_MARGIN = 1.25  # the prefix must exceed the limit by this factor, because its last token may be split
# Unicode composition shrinks UTF-8 text by at most this factor (three Hangul letters become one syllable), so a prompt
# with more bytes than this times the bytes of the tokens cannot fit, whatever the normalizer of the tokenizer does.
NORMALIZATION_FACTOR = 3

T = TypeVar("T")
ANY_MODEL = "default"  # a name for whatever model is served
RANDOM_SEED = -1


class _Encoded(NamedTuple):
    """The tokens of a prompt; `cut`: without those at its start."""

    tokens: list[int]
    cut: bool


class _Checked(NamedTuple):
    """What the checks of sampling parameters have made of them. `banned`: the token sequences of bad words."""

    banned: tuple[tuple[int, ...], ...]
    grammar: CheckedGrammar | None
    stop_regex: StopRegex | None


class RequestPreprocessor:
    """Checks and tokenizes requests for one model."""

    def __init__(self, settings: ServerSettings, text: TextProcessor, grammars: Grammars) -> None:
        self._settings, self._grammars = settings, grammars
        generator = random.SystemRandom() if settings.random_seed is None else random.Random(settings.random_seed)
        self._random_bits = generator.getrandbits
        self._text = text
        self._work = TextWork(text, settings.text)
        self.counts = self._work.counts
        max_bytes = settings.max_prompt_bytes
        if max_bytes is None:
            longest_token = max((len(text.token_bytes(token)) for token in range(text.vocab_size)), default=1)
            max_bytes = NORMALIZATION_FACTOR * settings.context_length * max(longest_token, 4)
        self.max_prompt_bytes = max_bytes

    def close(self) -> None:
        self._grammars.close()
        self._work.close()

    async def send_vocabulary(self, param: str) -> None:
        """See `Grammars.send_vocabulary`."""
        await self._grammars.send_vocabulary(param)

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in (self._settings.model_name, ANY_MODEL):
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

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, param: str) -> list[list[int]]:
        """Encode texts of any number of tokens. Raises RequestError if one has too many bytes."""
        for text in texts:
            self.check_bytes(text, param)
        sizes = list(map(len, texts))
        tokens: list[list[int]] = []
        inline = is_little(sizes)
        for part in split(sizes):
            chosen = [texts[index] for index in part]
            tokens += await self._work.encode_part(chosen, add_special_tokens, inline)
        return tokens

    def check_bytes(self, text: str, param: str) -> None:
        if not self._text.has_tokenizer:
            raise no_tokenizer(param)
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

    async def _refuse_by_prefix(self, text: str, param: str, min_output: int) -> None:
        """Refuse a text whose prefix alone has too many tokens, at a cost that does not depend on its length."""
        available = self._settings.request_token_limit
        if len(text) <= max(PROBE_CHARACTERS_PER_TOKEN * available, INLINE_COST):
            return
        prefix = text[: PROBE_CHARACTERS_PER_TOKEN * available]
        (probed,) = await self._work.encode_part([prefix], False, inline=False)
        if len(probed) > PROBE_MARGIN * available:
            self.check_prompt_length(int(len(probed) / PROBE_MARGIN), param, min_output, "over ")

    async def decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return await self._work.decode_all(sequences, skip_special_tokens)

    async def token_texts(self, sequences: Sequence[Sequence[int]]) -> list[list[str]]:
        """The text of each token."""
        inline = is_little(list(map(len, sequences)))
        text = self._text.token_text
        return await self._work.run(lambda: [[text(token) for token in tokens] for tokens in sequences], inline)

    async def render(
        self,
        messages: list[dict[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        template: str | None = None,
    ) -> str:
        """Render the prompt text of a conversation. `template`: the one of the request, if it has one."""
        if template is not None and not self._settings.trust_request_chat_template:
            raise RequestError(
                "chat_template is refused: this server takes no templates of requests; remove it, or start the server"
                " with --trust-request-chat-template",
                code="templates_disabled",
                param="chat_template",
            )
        if template is None and not self._text.has_chat_template:
            raise RequestError(
                "the model has no chat template; use /v1/completions, or start the server with --chat-template",
                code="no_chat_template",
                param="messages",
            )
        return await self._work.render(messages, add_generation_prompt, variables, template)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises RequestError for a token id outside the vocabulary."""
        if tokens and (min(tokens) < 0 or max(tokens) >= self._settings.vocab_size):
            bad = next(token for token in tokens if not 0 <= token < self._settings.vocab_size)
            raise RequestError(
                f"{param} contains token id {shorten(bad)}; the vocabulary is 0 to {self._settings.vocab_size - 1}",
                code="invalid_token_id",
                param=param,
            )

    def kept(self, truncate: int | None, output: int) -> int | None:
        """How many tokens at the end of a prompt to keep for this `truncate_prompt_tokens`, if `output` follow."""
        return max(1, self._settings.request_token_limit - output) if truncate == -1 else truncate

    async def tokenize(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[str],
        *,
        special: bool,
        min_output: int,
        keep: int | None = None,
    ) -> list[list[int]]:
        """The checked token ids of prompts that each leave `min_output` tokens for the output. Raises RequestError.

        params: the request's field with each prompt. keep: as `kept` returns it.
        """
        await self.refuse_early(prompts, params, min_output, keep)
        tokens: list[list[int]] = []
        sizes = _sizes(prompts)
        inline = is_little(sizes)
        for part in split(sizes):
            encoded = await self._tokenize_part(prompts, params, part, special, min_output, keep, inline)
            tokens += [prompt.tokens for prompt in encoded]
        return tokens

    async def prepare_all(
        self,
        requests: Sequence[PromptRequest],
        *,
        default_max_tokens: int | None,
        special: bool = True,
        keep: int | None = None,
    ) -> list[TokenizedPrompt]:
        """Tokenize and check the prompts of one request. Raises RequestError, if possible before it tokenizes any.

        default_max_tokens: None: as many as fit. keep: as `kept` returns it.
        """
        self._check_generates()
        complete = {
            id(request.sampling): with_defaults(request.sampling, self._settings.sampling_defaults)
            for request in requests
        }
        requests = [replace(request, sampling=complete[id(request.sampling)]) for request in requests]
        checked: dict[int, _Checked] = {}
        for request in requests:
            if id(request.sampling) not in checked:
                checked[id(request.sampling)] = await self._check(request)
        prompts, params = [request.prompt for request in requests], [request.param for request in requests]
        await self.refuse_early(prompts, params, 1, keep)
        prepared: list[TokenizedPrompt] = []
        sizes = _sizes(prompts)
        inline = is_little(sizes)
        for part in split(sizes):
            encoded = await self._tokenize_part(prompts, params, part, special, 1, keep, inline)
            prepared += [
                self._complete(requests[at], one, default_max_tokens, checked[id(requests[at].sampling)])
                for at, one in zip(part, encoded, strict=True)
            ]
        return prepared

    def _check_generates(self) -> None:
        if not self._settings.generates:
            why = ", because its weights have no output layer" if self._settings.headless else ""
            raise RequestError(
                f"{self._settings.model_name} generates no text{why}; use /v1/embeddings, /rerank, /score or /classify",
                code="no_generation",
            )

    async def in_parts(self, sizes: Sequence[int], work: Callable[[range], list[T]]) -> list[T]:
        """The results of `work` on texts of these lengths, in parts, off the event loop unless they are little."""
        inline, results = is_little(sizes), []
        for part in split(sizes):
            results += await self._work.run(lambda part=part: work(part), inline)  # type: ignore[misc]
            await asyncio.sleep(0)  # other requests take turns
        return results

    async def _check(self, request: PromptRequest) -> _Checked:
        """The checks that need no prompt. Raises RequestError."""
        sampling, field = request.sampling, request.field
        self._check_sampling(sampling, field)
        self._check_texts(request)
        banned = await self._banned(sampling, field)
        grammar = await checked_grammar(self._grammars, sampling, field, request.owner)
        compiled = partial(compile_stops, sampling.stop_regex, field("stop_regex"))
        return _Checked(banned, grammar, await self._work.run(compiled, inline=not sampling.stop_regex))

    def _check_texts(self, request: PromptRequest) -> None:
        """Raises RequestError for a text that needs a tokenizer, if there is none."""
        for name in ("stop", "stop_regex", "bad_words"):
            if getattr(request.sampling, name) and not self._text.has_tokenizer:
                raise no_tokenizer(request.field(name))

    async def _banned(self, sampling: Sampling, field: Callable[[str], str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of `bad_words`. Raises RequestError if nothing can be sampled without them."""
        texts = forms(sampling.bad_words)
        encoded = await self._work.encode_part(texts, False, is_little(list(map(len, texts)))) if texts else []
        banned = sequences(encoded, self._settings.vocab_size)
        check_tokens_left(sampling, banned, field)
        return banned

    async def prepare(
        self, prompt: Prompt, sampling: Sampling, *, param: str, default_max_tokens: int | None
    ) -> TokenizedPrompt:
        """Tokenize and check one prompt; see `prepare_all`."""
        (prepared,) = await self.prepare_all(
            [PromptRequest(prompt, sampling, param)], default_max_tokens=default_max_tokens
        )
        return prepared

    async def refuse_early(
        self, prompts: Sequence[Prompt], params: Sequence[str], min_output: int, keep: int | None
    ) -> None:
        """Raises RequestError for the first prompt that is refused without tokenizing all of it."""
        for prompt, param in zip(prompts, params, strict=True):
            if isinstance(prompt, str):
                self.check_bytes(prompt, param)
            else:
                self.check_prompt_length(min(len(prompt), keep or len(prompt)), param, min_output)
                self.check_tokens(prompt, param)
        for prompt, param in zip(prompts, params, strict=True):
            if isinstance(prompt, str) and keep is None:
                await self._refuse_by_prefix(prompt, param, min_output)

    async def _tokenize_part(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[str],
        part: range,
        special: bool,
        min_output: int,
        keep: int | None,
        inline: bool,
    ) -> list[_Encoded]:
        texts = [prompt for index in part if isinstance(prompt := prompts[index], str)]
        encoded = iter(await self._work.encode_part(texts, special, inline) if texts else [])
        checked: list[_Encoded] = []
        for index in part:
            prompt = prompts[index]
            tokens = next(encoded) if isinstance(prompt, str) else prompt
            affixes = self._text.affixes if special and isinstance(prompt, str) else SpecialTokenAffixes()
            kept_tokens = tokens if keep is None or len(tokens) <= keep else self._cut(tokens, keep, affixes)
            checked.append(_Encoded(kept_tokens, len(kept_tokens) < len(tokens)))
            self.check_prompt_length(len(kept_tokens), params[index], min_output)
        await asyncio.sleep(0)  # other requests take turns
        return checked

    def _cut(self, tokens: list[int], keep: int, affixes: SpecialTokenAffixes) -> list[int]:
        """`keep` tokens of a prompt: its last ones, or of a model that does not continue it, the first of its text.

        affixes: the special tokens that the tokenizer added, which the latter keeps.
        """
        return tokens[len(tokens) - keep :] if self._settings.generates else without_end(tokens, keep, affixes)

    def _complete(
        self,
        request: PromptRequest,
        encoded: _Encoded,
        default_max_tokens: int | None,
        checked: _Checked,
    ) -> TokenizedPrompt:
        """Check the lengths of a tokenized prompt and of its output, and set the defaults."""
        sampling, prompt, tokens = request.sampling, request.prompt, encoded.tokens
        available = self._settings.request_token_limit - len(tokens)
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = available if default_max_tokens is None else min(available, default_max_tokens)
            max_tokens = max(max_tokens, min(sampling.min_tokens, available))
        if request.clip:
            max_tokens = min(max_tokens, available)
        self._check_lengths(len(tokens), max_tokens, available, sampling, request.field)
        seed = self._random_bits(63) if sampling.seed is None or sampling.seed == RANDOM_SEED else sampling.seed
        return TokenizedPrompt(
            text=prompt if isinstance(prompt, str) and not encoded.cut else None,
            tokens=tokens,
            sampling=sampling,
            params=engine_params(sampling, max(1, max_tokens), checked.banned, self._settings.vocab_size),
            seeds=seeds_for(seed, sampling.n),
            score_only=max_tokens == 0,
            namespace=request.namespace,
            markers=request.markers,
            grammar=checked.grammar,
            stop_regex=checked.stop_regex,
        )

    def check_prompt_length(self, prompt_tokens: int, param: str, min_output: int, qualifier: str = "") -> None:
        settings = self._settings
        if prompt_tokens == 0:
            raise RequestError(f"{param} is empty; send at least one token", code="empty_prompt", param=param)
        if prompt_tokens + min_output > settings.request_token_limit:
            limit, code = self._limit()
            problem = f"which leaves none for the output: {limit}" if min_output else f"but {limit}"
            raise RequestError(
                f"{param} has {qualifier}{prompt_tokens} tokens, {problem}; shorten it", code=code, param=param
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

    def _check_sampling(self, sampling: Sampling, field: Callable[[str], str]) -> None:
        self.check_tokens(sampling.stop_token_ids, field("stop_token_ids"))
        self.check_tokens([token for token, _ in sampling.logit_bias], field("logit_bias"))
        self.check_tokens(sampling.allowed_token_ids, field("allowed_token_ids"))
        processors = self._settings.custom_processors
        check_processor(sampling.custom_processor, sampling.custom_params, processors, field)
        check_stop_counts(sampling, self._settings.max_stop_strings, field)


def _sizes(prompts: Sequence[Prompt]) -> list[int]:
    """What each prompt costs to tokenize: token ids cost nothing."""
    return [len(prompt) if isinstance(prompt, str) else 0 for prompt in prompts]
