"""`/v1/chat/completions`. Must not know how sequences are generated or templates are rendered."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NoReturn

import msgspec
from starlette.requests import Request

from srv.errors import RequestError
from srv.reply.events import CallArguments, CallStart, ParsedReply, Reasoning, ReplyEvent, Text
from srv.reply.tools import Message, ToolCalling, ToolUse
from srv.server.generation import CompletedSequence, OutputDelta, RequestGroup, Sequence
from srv.server.http.auth import owner_of
from srv.server.protocols.common.conversations import Conversation
from srv.server.protocols.common.endpoint import Asked
from srv.server.protocols.common.listed_logprobs import check_listed, check_needs_logprobs
from srv.server.protocols.common.logprobs import chat_logprobs, prompt_logprobs, token_texts
from srv.server.protocols.common.reply_reader import ReplyReader, prepare
from srv.server.protocols.common.thinking import AskedBudget
from srv.server.protocols.common.tool_fields import AskedChoice
from srv.server.protocols.openai.common import OpenAIEndpoint, OpenAIFormatter, finish_name
from srv.server.protocols.openai.fields import ChatBody, ChatMessage, EmbeddingBody, TokenizeBody
from srv.server.request.sampling_fields import Sampling
from srv.server.service import Service
from srv.types import FinishReason, TokenLogprob

_OWN_VARIABLES = ("messages", "add_generation_prompt", "tools", "documents", "chat_template", "tokenize")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_NAMES_OF_JINJA = ("self", "super", "loop", "caller", "varargs", "kwargs", "true", "false", "none")
_FUNCTIONS = ("raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner")
RESERVED_TEMPLATE_VARIABLES = frozenset((*_OWN_VARIABLES, *_SPECIAL_TOKENS, *_NAMES_OF_JINJA, *_FUNCTIONS))


class ChatFormatter(OpenAIFormatter):
    """Formats message choices; a stream starts with the role and ends with the finish reason.

    `reader`: makes what reads the reply of one sequence.
    """

    prefix: ClassVar[str] = "chatcmpl"
    object_type: ClassVar[str] = "chat.completion"
    chunk_object_type: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, use: ToolUse, reader: Callable[[], ReplyReader]) -> None:
        super().__init__(service.settings, body)
        self._text = service.text
        self._shown = token_texts(service.text, body.return_tokens_as_token_ids)
        self._logprobs, self._listed = bool(body.logprobs), body.logprob_token_ids
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._token_ids = bool(body.return_token_ids)
        self._new_reader = reader
        self._forced = use.forced

    def begin(self, group: RequestGroup) -> None:
        super().begin(group)
        self._readers = [self._new_reader() for _ in group.sequences]
        self._replies = [ParsedReply() for _ in group.sequences]

    def opening_choices(self) -> list[dict[str, object]]:
        return [_delta(sequence.index, {"role": "assistant", "content": ""}) for sequence in self.group.sequences]

    def shared(self, sequence: Sequence, scores: list[TokenLogprob] | None) -> dict[str, object]:
        fields: dict[str, object] = {}
        if self._prompt_logprobs and scores is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._text, sequence.prompt.tokens, scores)
        if self._token_ids:
            fields["prompt_token_ids"] = sequence.prompt.tokens
        return fields

    def chunk(self, delta: OutputDelta) -> list[dict[str, object]]:
        index = delta.sequence.index
        reader = self._readers[index]
        parts = [part for event in reader.read(delta) if (part := _event_delta(event)) is not None]
        choices = [_delta(index, part) for part in parts]
        if ((self._logprobs or self._token_ids) and delta.tokens) or delta.prompt_logprobs is not None:
            choices = choices or [_delta(index, {"content": ""})]
        if choices:
            choices[0]["logprobs"] = self._format_logprobs(delta.logprobs)
            for choice in choices if self._token_ids else ():
                choice["token_ids"] = delta.tokens if choice is choices[0] else []
        if delta.finish is not None:
            closing = _delta(index, {})
            reason = _finish_name(delta.finish, reader)
            choices.append({**closing, "finish_reason": reason, "matched_stop": delta.matched})
        return choices

    def collect(self, delta: OutputDelta) -> None:
        super().collect(delta)
        index = delta.sequence.index
        self._replies[index].add(self._readers[index].read(delta))

    def choice(self, result: CompletedSequence) -> dict[str, object]:
        index = result.sequence.index
        choice: dict[str, object] = {
            "index": index,
            "message": _message(self._replies[index], self._forced),
            "logprobs": self._format_logprobs(result.logprobs),
            "finish_reason": _finish_name(result.finish, self._readers[index]),
            "matched_stop": result.sequence.matched,
        }
        return {**choice, "token_ids": result.tokens} if self._token_ids else choice

    def _format_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, object] | None:
        return chat_logprobs(self._shown, logprobs, self._listed) if self._logprobs else None


def _delta(index: int, delta: dict[str, object], logprobs: dict[str, object] | None = None) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _event_delta(event: ReplyEvent) -> dict[str, object] | None:
    """The delta of a stream; None for an event of which a stream says nothing."""
    match event:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
    return None


def _reasoning(text: str) -> dict[str, object]:
    """In the two fields that clients read it from: DeepSeek's name, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _message(reply: ParsedReply, forced: bool) -> dict[str, object]:
    """`forced`: the request asks for calls. A reply that was cut before the first one has none, as with OpenAI."""
    content = None if not reply.text and (reply.calls or reply.reasoning) else reply.text
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if reply.reasoning:
        message |= _reasoning(reply.reasoning)
    if reply.calls or forced:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def _finish_name(finish: FinishReason, reader: ReplyReader) -> str | None:
    has_calls = finish is FinishReason.STOP and reader.calls and not reader.ends_cut
    return "tool_calls" if has_calls else finish_name(finish)


def _use_of(body: ChatBody) -> ToolUse:
    tools = tuple(tool.tool(f"tools[{index}]") for index, tool in enumerate(body.tools or ()))
    tool_choice = body.tool_choice or AskedChoice(ToolCalling.AUTO)
    return ToolUse(tool_choice.of(tools), tool_choice.choice, tool_choice.name, body.parallel_tool_calls is not False)


_FIELDS_OF_ROLES = (
    ("tool_call_id", "tool"),
    ("tool_calls", "assistant"),
    ("reasoning_content", "assistant"),
    ("reasoning", "assistant"),
)


def _read_message(message: ChatMessage, where: str) -> Message:
    """A message in the form of all protocols. Raises RequestError for fields that its role does not have."""
    if message.content is None and not (message.tool_calls or message.reasoning_content or message.reasoning):
        _refuse(f"{where}.content", "is null; send a text")
    if message.role == "tool" and message.tool_call_id is None:
        _refuse(f"{where}.tool_call_id", "is missing; a message of role tool needs the id of the call that it answers")
    for name, role in _FIELDS_OF_ROLES:
        if message.role != role and getattr(message, name):
            _refuse(f"{where}.{name}", f"is refused in a message of role {message.role}: only {role} has it; remove it")
    return Message(
        role="system" if message.role == "developer" else message.role,  # templates only know the older name
        content=message.content,
        name=message.name,
        reasoning=message.reasoning if message.reasoning_content is None else message.reasoning_content,
        calls=tuple(call.call() for call in message.tool_calls or ()),
        call_id=message.tool_call_id,
    )


def _refuse(param: str, why: str) -> NoReturn:
    raise RequestError(f"{param} {why}", code="invalid_value", param=param)


def read_conversation(
    body: ChatBody | TokenizeBody | EmbeddingBody, variables: dict[str, object], use: ToolUse, limit: int
) -> Conversation:
    """`limit`: on messages. Raises RequestError."""
    messages, begins, continued = body.messages or [], body.add_generation_prompt, bool(body.continue_final_message)
    if len(messages) > limit:
        raise RequestError(
            f"messages has {len(messages)} entries, more than the context has tokens; send fewer",
            code="context_length_exceeded",
            param="messages",
        )
    if reserved := sorted(RESERVED_TEMPLATE_VARIABLES & variables.keys()):
        param = f"chat_template_kwargs.{reserved[0]}"
        _refuse(param, "is refused: the template or the server sets it; remove it")
    read = [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if continued and (messages[-1].role != "assistant" or begins):
        _refuse("continue_final_message", "is refused: it needs a last message of the assistant, and no other begun")
    return Conversation(
        read,
        use,
        variables,
        continued=continued,
        begins_reply=begins is not False,
        template=body.chat_template,
    )


class Chat(OpenAIEndpoint):
    async def ask(self, body: object, request: Request | None = None) -> Asked:
        fields = ChatBody.parse(body)
        preprocessor = self.service.preprocessor
        preprocessor.check_model(fields.model)
        preprocessor.check_tokens(fields.logprob_token_ids, "logprob_token_ids")
        sampling = _sampling(fields)
        preprocessor.check_count(1, sampling.n, "n")
        limit, use, budget = self.service.settings.context_length, _use_of(fields), fields.thinking_token_budget
        prompt, reader = await prepare(
            self.service,
            read_conversation(fields, _variables(fields), use, limit),
            sampling,
            field_of=fields.field_of,
            namespace=fields.namespace,
            owner=owner_of(request),
            separate_reasoning=fields.separate_reasoning is not False,
            stream_reasoning=fields.stream_reasoning is not False,
            truncate=fields.truncate_prompt_tokens,
            thinking=None if budget is None else AskedBudget(budget, "thinking_token_budget"),
        )
        check_listed([prompt], "logprob_token_ids", "max_tokens")
        formatter = ChatFormatter(self.service, fields, use, reader)
        return Asked([prompt], [formatter.id], bool(fields.stream), formatter)


def _sampling(fields: ChatBody) -> Sampling:
    """With the fields that are requested differently here. Raises RequestError."""
    sampling = fields.sampling()
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
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError(
            "top_logprobs is refused: it needs logprobs = true; send both or neither",
            code="invalid_value",
            param="top_logprobs",
        )
    check_needs_logprobs(fields.logprob_token_ids, bool(fields.logprobs), "logprobs = true")
    return msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens if max_tokens is not None else max_completion_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        logprob_token_ids=fields.logprob_token_ids,
    )


def _variables(fields: ChatBody) -> dict[str, object]:
    """Those of the chat template that the request sets."""
    effort = {"reasoning_effort": fields.reasoning_effort} if fields.reasoning_effort else {}
    return {**effort, **(fields.chat_template_kwargs or {})}
