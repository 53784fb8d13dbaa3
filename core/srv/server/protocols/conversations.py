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
from srv.server.preprocessor import RequestPreprocessor

SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class Conversation:
    """`variables`: of the template. `param`: the request's field with the messages.

    `continued`: a last message of the assistant is the beginning of the reply. `begins_reply`: the prompt ends with the
    beginning of a message of the assistant otherwise.
    """

    messages: list[Message]
    tools: ToolUse = field(default_factory=ToolUse)
    variables: Mapping[str, object] = field(default_factory=dict)
    param: str = "messages"
    continued: bool = False
    begins_reply: bool = True


def joined(texts: Iterable[str | None]) -> str | None:
    """The texts in lines of their own; None if there are none."""
    given = [text for text in texts if text is not None]
    return SEPARATOR.join(given) if given else None


def merged(messages: Iterable[Message]) -> list[Message]:
    """The messages, neighbours of the same role (user, assistant, leading system) as one."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        same = last is not None and last.role == message.role and (message.role != "system" or len(found) == 1)
        if last is None or not same or message.role == "tool":
            found.append(message)
            continue
        found[-1] = replace(
            last,
            content=joined((last.content, message.content)),
            reasoning=joined((last.reasoning, message.reasoning)),
            calls=last.calls + message.calls,
        )
    return found


def with_leading_system_only(messages: list[Message]) -> list[Message]:
    """The messages with system messages in the middle as text of the user, for templates that refuse them there.

    They stay where they are: at the top they would change the prompt's beginning, and no cached prefix would fit.
    """
    return merged(
        replace(message, role="user") if message.role == "system" and index else message
        for index, message in enumerate(messages)
    )


async def render(preprocessor: RequestPreprocessor, conversation: Conversation) -> str:
    """The text of the prompt. Raises RequestError."""
    messages = conversation.messages
    try:
        return await _render(preprocessor, conversation, messages)
    except RequestError as refused:
        if refused.code != "chat_template_error" or (moved := with_leading_system_only(messages)) == messages:
            raise
    return await _render(preprocessor, conversation, moved)


async def _render(preprocessor: RequestPreprocessor, conversation: Conversation, messages: list[Message]) -> str:
    tools = conversation.tools.for_template()
    variables = dict(conversation.variables) if tools is None else {**conversation.variables, "tools": tools}
    begun = messages[-1] if conversation.continued and messages[-1].role == "assistant" else None
    begins = begun is None and conversation.begins_reply
    if begun is None:
        return await preprocessor.render(template_messages(messages, conversation.param), begins, variables)
    mark = uuid4().hex  # at the end of what the client began; the prompt is what the template writes before it
    content = (begun.content or "").rstrip()
    text = ""
    if content and not begun.calls:
        marked = [*messages[:-1], replace(begun, content=content + mark)]
        text = await preprocessor.render(template_messages(marked, conversation.param), begins, variables)
    if mark not in text:
        why = "has calls, which need results" if begun.calls else "has no text that can be continued"
        raise RequestError(
            f"the last message of {conversation.param} is the assistant's and {why}; end with a message of the user",
            code="invalid_value",
            param=conversation.param,
        )
    return text.partition(mark)[0]
