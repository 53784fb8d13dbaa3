"""The tools of a request, and which of them the model may call. Each protocol builds these from its own fields.

Must not know the fields of any protocol, or the format of any model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from srv.errors import RequestError
from srv.reply.json_text import parsed


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call. `parameters`: its JSON Schema; None: it has none.

    `strict`: its arguments must follow the schema, which a grammar enforces. `where`: the part of the request with its
    name, for errors.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    where: str = "tools"

    def for_template(self) -> dict[str, object]:
        """In the form that chat templates expect: OpenAI's."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


class Choice(StrEnum):
    """Whether the model calls tools: as it likes, never, at least once, or exactly the tool `ToolUse.named`."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how they may be used. `parallel`: more than one call per reply."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = Choice.AUTO
    named: str | None = None
    parallel: bool = True

    @property
    def active(self) -> bool:
        """Whether calls are looked for in the reply."""
        return bool(self.tools) and self.choice is not Choice.NONE

    def for_template(self) -> list[dict[str, object]] | None:
        """The tools that the prompt describes: none where none may be called."""
        return [tool.for_template() for tool in self.tools] if self.active else None


NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True)
class PriorCall:
    """A call in an earlier message of the assistant. `arguments`: JSON text, as the client sends it."""

    id: str
    name: str
    arguments: str

    def for_template(self, where: str) -> dict[str, object]:
        """Arguments are an object, because templates iterate over them or serialise them themselves.

        `where`: the field of the request, for the error. Raises RequestError for arguments that are not an object.
        """
        function = {"name": self.name, "arguments": parsed_arguments(self.arguments, where)}
        return {"id": self.id, "type": "function", "function": function}


def parsed_arguments(arguments: str, where: str) -> dict[str, Any]:
    """The arguments as an object; an empty text has none. Raises RequestError."""
    value = parsed(arguments) if arguments.strip() else {}
    if not isinstance(value, dict):
        shown = arguments if len(arguments) <= 80 else f"{arguments[:80]}..."
        raise RequestError(
            f"{where} = {json.dumps(shown)} is refused: it is not the text of a JSON object; send the arguments as"
            " the model wrote them, or {}",
            code="invalid_value",
            param=where,
        )
    return value


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, of any protocol.

    `role`: system, user, assistant or tool. `reasoning`: of an assistant; templates of models that think in tool loops
    read it. `call_id`: the call that a message of the role tool answers.
    """

    role: str
    content: str | None = None
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[PriorCall, ...] = ()
    call_id: str | None = None


def template_messages(messages: list[Message], where: str = "messages") -> list[dict[str, object]]:
    """The messages as variables of a chat template. `where`: the field of the request, for errors.

    A tool message gets the name of the call that it answers, which some templates print. Raises RequestError.
    """
    names: dict[str, str] = {}
    return [_for_template(message, names, f"{where}[{index}]") for index, message in enumerate(messages)]


def _for_template(message: Message, names: dict[str, str], where: str) -> dict[str, object]:
    """`names`: of the calls so far, by id."""
    out: dict[str, object] = {"role": message.role, "content": "" if message.content is None else message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.calls:
        out["tool_calls"] = [
            call.for_template(f"{where}.tool_calls[{index}].function.arguments")
            for index, call in enumerate(message.calls)
        ]
        names |= {call.id: call.name for call in message.calls}
    if message.call_id is not None:
        out["tool_call_id"] = message.call_id
    name = message.name or (names.get(message.call_id) if message.call_id is not None else None)
    return out if name is None else {**out, "name": name}


def count_calls(messages: list[Message]) -> int:
    """The number of calls in a conversation: the ids of some formats count on from there."""
    return sum(len(message.calls) for message in messages)
