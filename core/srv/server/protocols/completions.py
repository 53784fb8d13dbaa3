"""`/v1/completions`. Must not know how sequences are generated."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from srv.errors import RequestError
from srv.server.generation import CompletedSequence, OutputDelta, RequestGroup
from srv.server.preprocessor import TokenizedPrompt, read_prompts
from srv.server.protocols.logprobs import CompletionLogprobs, prompt_logprobs
from srv.server.protocols.openai import OpenAIEndpoint, ParsedRequest, finish_name
from srv.server.protocols.openai_fields import CompletionBody
from srv.server.sampling_fields import Sampling
from srv.server.text.processor import TextProcessor
from srv.types import FinishReason, TokenLogprob

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionFormatter:
    """Formats text choices; with `echo` they start with the prompt, and logprobs with its tokens."""

    def __init__(self, text: TextProcessor, body: CompletionBody, echo_texts: list[str] | None) -> None:
        self._text = text
        self._logprobs = body.logprobs is not None
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._echo_texts = echo_texts  # by prompt
        self._logprobs_by_sequence: dict[int, CompletionLogprobs] = {}  # by sequence

    def opening(self, group: RequestGroup) -> list[dict[str, object]]:
        return []

    def chunk(self, delta: OutputDelta) -> list[dict[str, object]]:
        return [self._choice(delta, delta.text, delta.tokens, delta.logprobs, delta.prompt_logprobs, delta.finish)]

    def choice(self, result: CompletedSequence) -> dict[str, object]:
        last = OutputDelta(result.sequence, "", [], [], None, result.finish, result.sequence.matched)
        return self._choice(last, result.text, result.tokens, result.logprobs, result.prompt_logprobs, result.finish)

    def _choice(
        self,
        delta: OutputDelta,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        prompt: list[TokenLogprob] | None,
        finish: FinishReason | None,
    ) -> dict[str, object]:
        sequence = delta.sequence
        first = sequence.index not in self._logprobs_by_sequence
        completion_logprobs = self._logprobs_by_sequence.setdefault(sequence.index, CompletionLogprobs(self._text))
        token_logprobs: list[TokenLogprob | None] = [*logprobs]
        if first and self._echo_texts is not None:
            text = self._echo_texts[sequence.prompt_index] + text
            if self._logprobs:
                missing = len(sequence.prompt.tokens) - len(prompt or ())
                tokens = [*sequence.prompt.tokens, *tokens]
                token_logprobs = [*[None] * missing, *(prompt or ()), *token_logprobs]
        choice: dict[str, object] = {
            "index": sequence.index,
            "text": text,
            "logprobs": completion_logprobs.add(tokens, token_logprobs) if self._logprobs else None,
            "finish_reason": finish_name(finish),
            "matched_stop": delta.matched,
        }
        if self._prompt_logprobs and prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._text, sequence.prompt.tokens, prompt)
        return choice


class Completions(OpenAIEndpoint):
    name: ClassVar[str] = "cmpl"
    object_type: ClassVar[str] = "text_completion"
    chunk_object_type: ClassVar[str] = "text_completion"

    async def parse(self, body: object) -> ParsedRequest:
        fields = CompletionBody.parse(body)
        preprocessor = self.service.preprocessor
        preprocessor.check_model(fields.model)
        prompts, batch = read_prompts(fields.prompt, "prompt")
        sampling = fields.sampling()
        preprocessor.check_count(len(prompts), sampling.n, "prompt")
        sampling = self._complete(sampling, fields)
        tokenized: list[TokenizedPrompt] = []
        for index, prompt in enumerate(prompts):
            tokenized.append(
                await preprocessor.prepare(
                    prompt,
                    sampling,
                    param=f"prompt[{index}]" if batch else "prompt",
                    default_max_tokens=DEFAULT_MAX_TOKENS,
                    special=fields.add_special_tokens is not False,
                )
            )
        echo_texts = [await self._echo(tokenized_prompt) for tokenized_prompt in tokenized] if fields.echo else None
        return ParsedRequest(
            fields, fields.stream_options, tokenized, CompletionFormatter(self.service.text, fields, echo_texts)
        )

    def _complete(self, sampling: Sampling, fields: CompletionBody) -> Sampling:
        """Add the fields that are requested differently here. Raises RequestError."""
        if sampling.max_tokens == 0 and not (fields.echo or fields.prompt_logprobs is not None):
            raise RequestError(
                "max_tokens = 0 is refused: it needs echo or prompt_logprobs; request at least 1",
                code="invalid_value",
                param="max_tokens",
            )
        prompt_logprobs = fields.prompt_logprobs
        if fields.echo and prompt_logprobs is None:
            prompt_logprobs = fields.logprobs
        return msgspec.structs.replace(sampling, logprobs=fields.logprobs, prompt_logprobs=prompt_logprobs)

    async def _echo(self, tokenized_prompt: TokenizedPrompt) -> str:
        if tokenized_prompt.text is not None:
            return tokenized_prompt.text
        return await self.service.preprocessor.decode(tokenized_prompt.tokens, skip_special_tokens=False)
