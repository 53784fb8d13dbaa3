"""`/v1/chat/completions`. Must not know how sequences are made or what a template is."""

from __future__ import annotations

from typing import ClassVar

from srv.errors import RequestError
from srv.server.generation import CompletedSequence, OutputDelta, RequestGroup
from srv.server.protocols.logprobs import chat_logprobs, prompt_logprobs
from srv.server.protocols.openai import OpenAIEndpoint, ParsedRequest, finish_name
from srv.server.protocols.openai_fields import ChatBody, ChatMessage
from srv.server.sampling_fields import Sampling
from srv.server.text.processor import TextProcessor
from srv.types import TokenLogprob

RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "chat_template", "tokenize"}
)


class ChatFormatter:
    """Message choices; a stream opens with the role and closes with the reason."""

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
            choice = _delta(index, {"content": delta.text}, self._shown(delta.logprobs))
            choices.append(self._with_prompt(choice, delta.sequence.prompt.tokens, delta.prompt_logprobs))
        if delta.finish is not None:
            closing = _delta(index, {})
            choices.append({**closing, "finish_reason": finish_name(delta.finish), "matched_stop": delta.matched})
        return choices

    def choice(self, result: CompletedSequence) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": result.sequence.index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._shown(result.logprobs),
            "finish_reason": finish_name(result.finish),
            "matched_stop": result.sequence.matched,
        }
        return self._with_prompt(choice, result.sequence.prompt.tokens, result.prompt_logprobs)

    def _shown(self, logprobs: list[TokenLogprob]) -> dict[str, object] | None:
        return chat_logprobs(self._text, logprobs) if self._logprobs else None

    def _with_prompt(
        self, choice: dict[str, object], prompt: list[int], scored: list[TokenLogprob] | None
    ) -> dict[str, object]:
        if self._prompt_logprobs and scored is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._text, prompt, scored)
        return choice


def _delta(index: int, delta: dict[str, object], logprobs: dict[str, object] | None = None) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _for_template(message: ChatMessage) -> dict[str, object]:
    # Templates were made before OpenAI renamed the role.
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.content, **named}


class Chat(OpenAIEndpoint):
    name: ClassVar[str] = "chatcmpl"
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    async def parse(self, body: object) -> ParsedRequest:
        fields = ChatBody.parse(body)
        preprocessor = self.service.preprocessor
        preprocessor.check_model(fields.model)
        preprocessor.check_count(1, fields.n or 1, "n")
        sampling = self._sampling(fields)
        prompt = await self.render(fields.messages, fields.add_generation_prompt, fields.chat_template_kwargs)
        # The template writes the special tokens itself.
        tokens = await preprocessor.encode(prompt, False, "messages")
        tokenized_prompt = await preprocessor.prepare(tokens, sampling, param="messages", default_max_tokens=None)
        return ParsedRequest(
            fields, fields.stream_options, [tokenized_prompt], ChatFormatter(self.service.text, fields)
        )

    async def render(
        self, messages: list[ChatMessage], add_generation_prompt: bool | None, extra: dict[str, object] | None
    ) -> str:
        """The conversation as the model's template writes it. Raises RequestError."""
        if len(messages) > self.service.settings.context_length:
            raise RequestError(
                f"messages has {len(messages)} entries, more than the context has tokens; send fewer",
                code="context_length_exceeded",
                param="messages",
            )
        for index, message in enumerate(messages):
            if message.content is None:
                raise RequestError(
                    f"messages[{index}].content is null: there is nothing to say; send a text",
                    code="invalid_value",
                    param=f"messages[{index}].content",
                )
        if taken := sorted(RESERVED_TEMPLATE_NAMES & (extra or {}).keys()):
            raise RequestError(
                f"chat_template_kwargs.{taken[0]} is refused: the server sets it; remove it",
                code="invalid_value",
                param=f"chat_template_kwargs.{taken[0]}",
            )
        shown = [_for_template(message) for message in messages]
        return await self.service.preprocessor.render(shown, add_generation_prompt is not False, extra or {})

    def _sampling(self, fields: ChatBody) -> Sampling:
        old, new = fields.max_tokens, fields.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError(
                f"max_tokens = {old} and max_completion_tokens = {new} disagree; send one of them",
                code="invalid_value",
                param="max_tokens",
            )
        if old == 0:
            raise RequestError(
                "max_tokens = 0 is refused: it leaves no room for an answer; ask for at least 1",
                code="invalid_value",
                param="max_tokens",
            )
        if fields.top_logprobs is not None and not fields.logprobs:
            raise RequestError(
                "top_logprobs is refused: it needs logprobs = true; send both or neither",
                code="invalid_value",
                param="top_logprobs",
            )
        return fields.sampling(old if old is not None else new, (fields.top_logprobs or 0) if fields.logprobs else None)
