"""The tools of a request, and which of them the model may call. Each protocol builds these from its own fields.

Must not know the fields of any protocol, or the format of any model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from srv.reply.json_text import parsed


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call. `parameters`: its JSON Schema; None: it has none.

    `strict`: its arguments must follow the schema, which a grammar enforces. `where`: the part of the request with its
    name, for errors; `schema_field`: the field there with its parameters.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    where: str = "tools"
    schema_field: str = "parameters"

    def for_template(self) -> dict[str, object]:
        """In the form that chat templates expect: OpenAI's."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


class ToolCalling(StrEnum):
    """Whether the model calls tools: as it likes, never, at least once, or exactly the tool `ToolUse.name`."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how they may be used. `name`: the one to call, if `choice` is NAMED.

    `parallel`: whether a reply may have several calls.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolCalling = ToolCalling.AUTO
    name: str | None = None
    parallel: bool = True

    @property
    def active(self) -> bool:
        """Whether calls are looked for in the reply."""
        return bool(self.tools) and self.choice is not ToolCalling.NONE

    @property
    def forced(self) -> bool:
        """Whether the reply is calls and nothing else."""
        return self.choice in (ToolCalling.REQUIRED, ToolCalling.NAMED)

    def for_template(self) -> list[dict[str, object]] | None:
        """The tools that the prompt describes: none where none may be called."""
        return [tool.for_template() for tool in self.tools] if self.active else None


NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True)
class PriorCall:
    """A call in an earlier message of the assistant. `arguments`: any text, as a model writes it; "": none."""

    id: str
    name: str
    arguments: str

    @property
    def has_object(self) -> bool:
        """Whether the arguments are a JSON object, or there are none."""
        return isinstance(self._value, dict)

    def for_template(self) -> dict[str, object]:
        """Arguments are an object, because templates iterate over them or serialise them themselves.

        Those of a reply that was cut, or that a model wrote wrong, are the text itself.
        """
        function = {"name": self.name, "arguments": self._value}
        return {"id": self.id, "type": "function", "function": function}

    @property
    def _value(self) -> object:
        if self.arguments.strip() in ("", "null"):
            return {}
        value = parsed(self.arguments)
        return value if isinstance(value, dict) else self.arguments


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


def template_messages(messages: list[Message]) -> list[dict[str, object]]:
    """The messages as variables of a chat template.

    A tool message gets the name of the call that it answers, which some templates print.
    """
    names: dict[str, str] = {}
    return [_for_template(message, names) for message in messages]


def _for_template(message: Message, names: dict[str, str]) -> dict[str, object]:
    """`names`: of the calls so far, by id."""
    out: dict[str, object] = {"role": message.role, "content": "" if message.content is None else message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.calls:
        out["tool_calls"] = [call.for_template() for call in message.calls]
        names |= {call.id: call.name for call in message.calls}
    if message.call_id is not None:
        out["tool_call_id"] = message.call_id
    name = message.name or (names.get(message.call_id) if message.call_id is not None else None)
    return out if name is None else {**out, "name": name}


def count_calls(messages: list[Message]) -> int:
    """The number of calls in a conversation: the ids of some formats count on from there."""
    return sum(len(message.calls) for message in messages)
