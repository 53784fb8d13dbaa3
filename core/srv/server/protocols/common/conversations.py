"""Conversations in one form for all protocols: messages, tools and variables, rendered as the text of a prompt.

Owns what every protocol needs between its own messages and the chat template: merging neighbours, system messages that
a template refuses in the middle, and replies that the client began. Must not know the fields of any protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from uuid import uuid4

from srv.errors import RequestError
from srv.reply.tools import Message, ToolUse, template_messages
from srv.server.request.preprocessor import RequestPreprocessor

SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class Conversation:
    """`variables`: of the template. `param`: the request's field with the messages.

    `continued`: a last message of the assistant is the beginning of the reply. `begins_reply`: the prompt ends with the
    beginning of a message of the assistant otherwise. `template`: renders it instead of the model's template.
    """

    messages: list[Message]
    tools: ToolUse = field(default_factory=ToolUse)
    variables: Mapping[str, object] = field(default_factory=dict)
    param: str = "messages"
    continued: bool = False
    begins_reply: bool = True
    template: str | None = None

    @property
    def continues_reply(self) -> bool:
        """Whether the prompt ends with a reply that the client began."""
        return self.continued and bool(self.messages) and self.messages[-1].role == "assistant"


def joined(texts: Iterable[str | None]) -> str | None:
    """The texts in lines of their own; None if there are none."""
    present = [text for text in texts if text is not None]
    return SEPARATOR.join(present) if present else None


def merged(messages: Iterable[Message]) -> list[Message]:
    """The messages, neighbours of the same role (user, assistant, leading system) as one."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else None
        same = last is not None and last.role == message.role and (message.role != "system" or len(result) == 1)
        if last is None or not same or message.role == "tool":
            result.append(message)
            continue
        result[-1] = replace(
            last,
            content=joined((last.content, message.content)),
            reasoning=joined((last.reasoning, message.reasoning)),
            calls=last.calls + message.calls,
        )
    return result


def with_leading_system_only(messages: list[Message]) -> list[Message]:
    """The messages with system messages in the middle as text of the user, for templates that refuse them there.

    They stay where they are: at the top they would change the prompt's beginning, and no cached prefix would fit.
    """
    return merged(
        replace(message, role="user") if message.role == "system" and index else message
        for index, message in enumerate(messages)
    )


async def count_tokens(preprocessor: RequestPreprocessor, conversation: Conversation) -> int:
    """The length of the prompt. Raises RequestError."""
    (tokens,) = await preprocessor.encode([await render(preprocessor, conversation)], False, conversation.param)
    return len(tokens)


async def shortened(preprocessor: RequestPreprocessor, conversation: Conversation, room: int) -> Conversation:
    """The conversation without as many of its oldest turns as its prompt has too many tokens for `room`.

    A turn begins with a message of the user. Leading system messages stay, and so does the last turn.
    """
    messages = conversation.messages
    system = messages[:1] if messages[0].role == "system" else []
    begins = [index for index, message in enumerate(messages) if message.role == "user"]
    longest = conversation
    low, high = 1, len(begins) - 1
    while low <= high:
        middle = (low + high) // 2
        shorter = replace(conversation, messages=[*system, *messages[begins[middle] :]])
        try:
            fits = await count_tokens(preprocessor, shorter) <= room
        except RequestError as refused:
            if refused.code != "context_length_exceeded":
                raise
            fits = False
        if fits or middle == len(begins) - 1:
            longest = shorter
        low, high = (low, middle - 1) if fits else (middle + 1, high)
    return longest


def with_objects_only(messages: list[Message]) -> list[Message]:
    """The messages with {} for arguments that are no JSON object, for templates that iterate over arguments."""
    return [
        replace(
            message, calls=tuple(call if call.has_object else replace(call, arguments="") for call in message.calls)
        )
        for message in messages
    ]


async def render(preprocessor: RequestPreprocessor, conversation: Conversation) -> str:
    """The text of the prompt. If the template refuses the conversation, it gets simpler forms of it, if there are any.

    Raises RequestError.
    """
    try:
        return await _render(preprocessor, conversation, conversation.messages)
    except RequestError as error:
        refused = error
    for form in _simpler_forms(conversation.messages):
        if refused.code != "chat_template_error":
            break
        try:
            return await _render(preprocessor, conversation, form)
        except RequestError as error:
            refused = error
    raise refused


def _simpler_forms(messages: list[Message]) -> list[list[Message]]:
    """What a template may accept that refuses the messages; each form once."""
    moved = with_leading_system_only(messages)
    forms = (moved, with_objects_only(messages), with_objects_only(moved))
    return [form for index, form in enumerate(forms) if form not in (messages, *forms[:index])]


async def _render(preprocessor: RequestPreprocessor, conversation: Conversation, messages: list[Message]) -> str:
    tools = conversation.tools.for_template()
    variables = dict(conversation.variables) if tools is None else {**conversation.variables, "tools": tools}
    begun = messages[-1] if conversation.continued and messages[-1].role == "assistant" else None
    begins = begun is None and conversation.begins_reply
    if begun is None:
        return await preprocessor.render(template_messages(messages), begins, variables, conversation.template)
    mark = uuid4().hex  # at the end of what the client began; the prompt is what the template writes before it
    content = (begun.content or "").rstrip()
    text = ""
    if content and not begun.calls:
        marked = [*messages[:-1], replace(begun, content=content + mark)]
        text = await preprocessor.render(template_messages(marked), begins, variables, conversation.template)
    if mark not in text:
        why = "has calls, which need results" if begun.calls else "has no text that can be continued"
        raise RequestError(
            f"the last message of {conversation.param} is the assistant's and {why}; end with a message of the user",
            code="invalid_value",
            param=conversation.param,
        )
    return text.partition(mark)[0]
