"""`/v1/chat/completions`. Must not know how sequences are generated or templates are rendered."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from srv.errors import RequestError
from srv.server.generation import CompletedSequence, OutputDelta, RequestGroup
from srv.server.protocols.logprobs import chat_logprobs, prompt_logprobs
from srv.server.protocols.openai import OpenAIEndpoint, ParsedRequest, finish_name
from srv.server.protocols.openai_fields import ChatBody, ChatMessage
from srv.server.sampling_fields import Sampling
from srv.server.text.processor import TextProcessor
from srv.types import TokenLogprob

RESERVED_TEMPLATE_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "chat_template", "tokenize"}
)


class ChatFormatter:
    """Formats message choices; a stream starts with the role and ends with the finish reason."""

    def __init__(self, text: TextProcessor, body: ChatBody) -> None:
        self._text = text
        self._logprobs = bool(body.logprobs)
        self._prompt_logprobs = body.prompt_logprobs is not None

    def opening(self, group: RequestGroup) -> list[dict[str, object]]:
        return [_delta(sequence.index, {"role": "assistant", "content": ""}) for sequence in group.sequences]

    def chunk(self, delta: OutputDelta) -> list[dict[str, object]]:
        index = delta.sequence.index
        choices: list[dict[str, object]] = []
        if delta.text or (self._logprobs and delta.tokens) or delta.prompt_logprobs is not None:
            choice = _delta(index, {"content": delta.text}, self._format_logprobs(delta.logprobs))
            choices.append(self._with_prompt(choice, delta.sequence.prompt.tokens, delta.prompt_logprobs))
        if delta.finish is not None:
            closing = _delta(index, {})
            choices.append({**closing, "finish_reason": finish_name(delta.finish), "matched_stop": delta.matched})
        return choices

    def choice(self, result: CompletedSequence) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": result.sequence.index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._format_logprobs(result.logprobs),
            "finish_reason": finish_name(result.finish),
            "matched_stop": result.sequence.matched,
        }
        return self._with_prompt(choice, result.sequence.prompt.tokens, result.prompt_logprobs)

    def _format_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, object] | None:
        return chat_logprobs(self._text, logprobs) if self._logprobs else None

    def _with_prompt(
        self, choice: dict[str, object], prompt: list[int], scores: list[TokenLogprob] | None
    ) -> dict[str, object]:
        if self._prompt_logprobs and scores is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._text, prompt, scores)
        return choice


def _delta(index: int, delta: dict[str, object], logprobs: dict[str, object] | None = None) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _template_message(message: ChatMessage) -> dict[str, object]:
    # Templates only know the older name of the role.
    role = "system" if message.role == "developer" else message.role
    name_field = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.content, **name_field}


class Chat(OpenAIEndpoint):
    name: ClassVar[str] = "chatcmpl"
    object_type: ClassVar[str] = "chat.completion"
    chunk_object_type: ClassVar[str] = "chat.completion.chunk"

    async def parse(self, body: object) -> ParsedRequest:
        fields = ChatBody.parse(body)
        preprocessor = self.service.preprocessor
        preprocessor.check_model(fields.model)
        sampling = fields.sampling()
        preprocessor.check_count(1, sampling.n, "n")
        sampling = self._complete(sampling, fields)
        prompt = await self.render(fields.messages, fields.add_generation_prompt, fields.chat_template_kwargs)
        # The rendered template contains the special tokens.
        tokens = await preprocessor.encode(prompt, False, "messages")
        tokenized_prompt = await preprocessor.prepare(
            tokens, sampling, param="messages", default_max_tokens=None, field=fields.field_of
        )
        return ParsedRequest(
            fields, fields.stream_options, [tokenized_prompt], ChatFormatter(self.service.text, fields)
        )

    async def render(
        self, messages: list[ChatMessage], add_generation_prompt: bool | None, extra: dict[str, object] | None
    ) -> str:
        """Render the conversation with the model's chat template. Raises RequestError."""
        if len(messages) > self.service.settings.context_length:
            raise RequestError(
                f"messages has {len(messages)} entries, more than the context has tokens; send fewer",
                code="context_length_exceeded",
                param="messages",
            )
        for index, message in enumerate(messages):
            if message.content is None:
                raise RequestError(
                    f"messages[{index}].content is null; send a text",
                    code="invalid_value",
                    param=f"messages[{index}].content",
                )
        if reserved := sorted(RESERVED_TEMPLATE_VARIABLES & (extra or {}).keys()):
            raise RequestError(
                f"chat_template_kwargs.{reserved[0]} is refused: the server sets it; remove it",
                code="invalid_value",
                param=f"chat_template_kwargs.{reserved[0]}",
            )
        template_messages = [_template_message(message) for message in messages]
        return await self.service.preprocessor.render(
            template_messages, add_generation_prompt is not False, extra or {}
        )

    def _complete(self, sampling: Sampling, fields: ChatBody) -> Sampling:
        """Add the fields that are requested differently here. Raises RequestError."""
        max_tokens, max_completion_tokens = sampling.max_tokens, fields.max_completion_tokens
        if max_tokens is not None and max_completion_tokens is not None and max_tokens != max_completion_tokens:
            raise RequestError(
                f"max_tokens = {max_tokens} and max_completion_tokens = {max_completion_tokens} differ; send one",
                code="invalid_value",
                param="max_tokens",
            )
        if max_tokens == 0:
            raise RequestError(
                "max_tokens = 0 is refused: a message needs at least 1 token",
                code="invalid_value",
                param="max_tokens",
            )
        if fields.top_logprobs is not None and not fields.logprobs:
            raise RequestError(
                "top_logprobs is refused: it needs logprobs = true; send both or neither",
                code="invalid_value",
                param="top_logprobs",
            )
        return msgspec.structs.replace(
            sampling,
            max_tokens=max_tokens if max_tokens is not None else max_completion_tokens,
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            prompt_logprobs=fields.prompt_logprobs,
        )
