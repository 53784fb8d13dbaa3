"""`/v1/completions`. Must not know how sequences are made."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

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
    """Text choices; with `echo` the prompt, and with logprobs its tokens, come first."""

    def __init__(self, text: TextProcessor, body: CompletionBody, echoes: list[str] | None) -> None:
        self._text = text
        self._logprobs = body.logprobs is not None
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._echoes = echoes  # the prompts' texts, by prompt
        self._shown: dict[int, CompletionLogprobs] = {}  # by sequence

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
        first = sequence.index not in self._shown
        shown = self._shown.setdefault(sequence.index, CompletionLogprobs(self._text))
        scored: list[TokenLogprob | None] = [*logprobs]
        if first and self._echoes is not None:
            text = self._echoes[sequence.prompt_index] + text
            if self._logprobs:
                missing = len(sequence.prompt.tokens) - len(prompt or ())
                tokens = [*sequence.prompt.tokens, *tokens]
                scored = [*[None] * missing, *(prompt or ()), *scored]
        choice: dict[str, object] = {
            "index": sequence.index,
            "text": text,
            "logprobs": shown.part(tokens, scored) if self._logprobs else None,
            "finish_reason": finish_name(finish),
            "matched_stop": delta.matched,
        }
        if self._prompt_logprobs and prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._text, sequence.prompt.tokens, prompt)
        return choice


class Completions(OpenAIEndpoint):
    name: ClassVar[str] = "cmpl"
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    async def parse(self, body: object) -> ParsedRequest:
        fields = CompletionBody.parse(body)
        preprocessor = self.service.preprocessor
        preprocessor.check_model(fields.model)
        prompts, batch = read_prompts(fields.prompt, "prompt")
        preprocessor.check_count(len(prompts), fields.n or 1, "prompt")
        sampling = self._sampling(fields)
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
        echoes = [await self._echo(tokenized_prompt) for tokenized_prompt in tokenized] if fields.echo else None
        return ParsedRequest(
            fields, fields.stream_options, tokenized, CompletionFormatter(self.service.text, fields, echoes)
        )

    def _sampling(self, fields: CompletionBody) -> Sampling:
        if fields.max_tokens == 0 and not (fields.echo or fields.prompt_logprobs is not None):
            raise RequestError(
                "max_tokens = 0 is refused: it makes sense with echo or prompt_logprobs only; ask for at least 1",
                code="invalid_value",
                param="max_tokens",
            )
        sampling = fields.sampling(fields.max_tokens, fields.logprobs)
        if fields.echo and fields.logprobs is not None and fields.prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=fields.logprobs)
        return sampling

    async def _echo(self, tokenized_prompt: TokenizedPrompt) -> str:
        if tokenized_prompt.text is not None:
            return tokenized_prompt.text
        return await self.service.preprocessor.decode(tokenized_prompt.tokens, skip_special_tokens=False)
