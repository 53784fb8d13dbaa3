"""`/v1/completions`. Must not know how sequences are generated."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from starlette.requests import Request

from srv.errors import RequestError
from srv.server.generation import CompletedSequence, OutputDelta
from srv.server.http.auth import owner_of
from srv.server.protocols.common.endpoint import Asked
from srv.server.protocols.common.listed_logprobs import check_listed, check_needs_logprobs
from srv.server.protocols.common.logprobs import CompletionLogprobs, prompt_logprobs, token_texts
from srv.server.protocols.openai.common import OpenAIEndpoint, OpenAIFormatter, finish_name
from srv.server.protocols.openai.fields import CompletionBody
from srv.server.request.prompt_request import PromptRequest, TokenizedPrompt
from srv.server.request.prompts import Prompt, read_prompts
from srv.server.request.sampling_fields import Sampling
from srv.server.service import Service
from srv.server.text.fill_in import fill_in_of
from srv.types import FinishReason, TokenLogprob

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionFormatter(OpenAIFormatter):
    """Formats text choices; with `echo` they start with the prompt, and logprobs with its tokens."""

    prefix: ClassVar[str] = "cmpl"
    object_type: ClassVar[str] = "text_completion"
    chunk_object_type: ClassVar[str] = "text_completion"

    def __init__(self, service: Service, body: CompletionBody, echo_texts: list[str] | None) -> None:
        super().__init__(service.settings, body)
        self._text = text = service.text
        self._shown = token_texts(text, body.return_tokens_as_token_ids)
        self._logprobs, self._listed = body.logprobs is not None, body.logprob_token_ids
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._token_ids = bool(body.return_token_ids) or not text.has_tokenizer
        self._echo_texts = echo_texts  # by prompt
        self._logprobs_by_sequence: dict[int, CompletionLogprobs] = {}  # by sequence

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
        sequence, output = delta.sequence, tokens
        first = sequence.index not in self._logprobs_by_sequence
        completion_logprobs = self._logprobs_by_sequence.setdefault(
            sequence.index, CompletionLogprobs(self._shown, token_ids=self._listed)
        )
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
        if self._token_ids:
            choice["token_ids"] = output
            if first:
                choice["prompt_token_ids"] = sequence.prompt.tokens
        return choice


class Completions(OpenAIEndpoint):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._fill_in = service.settings.fill_in or fill_in_of(service.text)

    async def ask(self, body: object, request: Request | None = None) -> Asked:
        fields = CompletionBody.parse(body)
        preprocessor = self.service.preprocessor
        preprocessor.check_model(fields.model)
        prompts, batch = read_prompts(fields.prompt, "prompt")
        if fields.suffix:
            prompts = self._with_suffix(prompts, fields.suffix, bool(fields.echo))
        preprocessor.check_tokens(fields.logprob_token_ids, "logprob_token_ids")
        sampling = fields.sampling()
        preprocessor.check_count(len(prompts), sampling.n, "prompt")
        sampling = self._complete(sampling, fields)
        tokenized = await preprocessor.prepare_all(
            [
                PromptRequest(
                    prompt,
                    sampling,
                    f"prompt[{index}]" if batch else "prompt",
                    namespace=fields.namespace,
                    owner=owner_of(request),
                )
                for index, prompt in enumerate(prompts)
            ],
            default_max_tokens=DEFAULT_MAX_TOKENS,
            special=fields.add_special_tokens is not False,
            keep=preprocessor.kept(fields.truncate_prompt_tokens, sampling.max_tokens or 1),
        )
        check_listed(tokenized, "logprob_token_ids", "max_tokens")
        echo_texts = await self._echo(tokenized) if fields.echo else None
        formatter = CompletionFormatter(self.service, fields, echo_texts)
        return Asked(tokenized, [formatter.id], bool(fields.stream), formatter)

    def _with_suffix(self, prompts: list[Prompt], suffix: str, echo: bool) -> list[Prompt]:
        """The prompts of texts that continue with `suffix` after the output. Raises RequestError."""
        if self._fill_in is None:
            raise RequestError(
                "suffix is refused: the model's tokenizer has no tokens that mark a suffix; remove it, or start the"
                " server with --completion-template",
                code="no_fill_in_tokens",
                param="suffix",
            )
        if echo:
            raise RequestError(
                "echo is refused with suffix: the prompt is not what was sent; remove one of them",
                code="invalid_value",
                param="echo",
            )
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) != len(prompts):
            raise RequestError(
                "prompt must be text if there is a suffix, not token ids; mark the parts in the token ids yourself",
                code="invalid_type",
                param="prompt",
            )
        return [self._fill_in.prompt(text, suffix) for text in texts]

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
        check_needs_logprobs(fields.logprob_token_ids, fields.logprobs is not None, "logprobs")
        return msgspec.structs.replace(
            sampling,
            logprobs=fields.logprobs,
            prompt_logprobs=prompt_logprobs,
            logprob_token_ids=fields.logprob_token_ids,
        )

    async def _echo(self, prompts: list[TokenizedPrompt]) -> list[str]:
        """The text of each prompt."""
        decoded = iter(
            await self.service.preprocessor.decode([prompt.tokens for prompt in prompts if prompt.text is None], False)
        )
        return [next(decoded) if prompt.text is None else prompt.text for prompt in prompts]
