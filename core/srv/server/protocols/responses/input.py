"""The items and tools of OpenAI's Responses in the form that all protocols share.

Must not know how a prompt is rendered or a reply is generated.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from srv.errors import RequestError
from srv.reply.tools import Message, PriorCall, Tool, ToolCalling, ToolUse
from srv.server.protocols.common.conversations import joined, merged
from srv.server.protocols.responses.fields import (
    ITEMS,
    CustomCallItem,
    CustomTool,
    FunctionCallItem,
    FunctionTool,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponsesBody,
)
from srv.server.request.fields import json_type, shorten

Item = Mapping[str, Any]
CUSTOM_INPUT = "input"  # the only argument of a custom tool as a function
# Tools that Codex always sends, whether a conversation needs them or not. A client would miss any other.
_LEFT_OUT = frozenset({"web_search", "image_generation", "local_shell", "namespace"})
_ENCODED = "srv-text:"


def read_items(
    body: ResponsesBody, earlier: Sequence[Item], find: Callable[[str], Item | None], new_id: Callable[[str], str]
) -> list[Item]:
    """The items of the whole conversation. `earlier`: those of the previous response. `find`: a stored item by its id.

    Items get an id if they have none, and their text becomes a part, as in OpenAI's. Raises RequestError.
    """
    new_items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if new_items is None:
        if not earlier:
            raise RequestError(
                "input is missing; send a text or an array of items", code="missing_field", param="input"
            )
        new_items = []
    if not isinstance(new_items, list):
        raise RequestError(
            f"input must be a string or an array of items, not {json_type(new_items)}",
            code="invalid_type",
            param="input",
        )
    items = [*earlier]
    for index, value in enumerate(new_items):
        where = f"input[{index}]"
        item = _resolved(value, where, find)
        kind = item.get("type") or "message"
        if not isinstance(kind, str):
            raise RequestError(
                f"{where}.type must be a string, not {json_type(kind)}", code="invalid_type", param=f"{where}.type"
            )
        items.append({**item, "type": kind, "id": item.get("id") or new_id(kind)})
        if kind == "message" and isinstance(content := item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            items[-1] = {**items[-1], "content": [{"type": part, "text": content}]}
    return items


def _resolved(value: object, where: str, find: Callable[[str], Item | None]) -> Item:
    if not isinstance(value, dict):
        raise RequestError(
            f"{where} must be an item, an object, not {json_type(value)}", code="invalid_type", param=where
        )
    if value.get("type") != "item_reference":
        return value
    item = find(value["id"]) if isinstance(value.get("id"), str) else None
    if item is None:
        raise RequestError(
            f"{where} refers to item {shorten(value.get('id'))}, which is not stored; send the item itself",
            code="item_not_found",
            param=f"{where}.id",
            status=404,
        )
    return item


def read_messages(items: Sequence[Item], instructions: str | None, earlier: int) -> list[Message]:
    """The messages of a conversation. `earlier`: how many of its items precede the input of this request.

    Raises RequestError that names the item at fault.
    """
    messages: list[Message | None] = [] if instructions is None else [Message("system", instructions)]
    for index, item in enumerate(items):
        where = f"input[{index - earlier}]" if index >= earlier else f"previous_response_id: item {index}"
        messages.append(_message(item, where))
    conversation = merged(message for message in messages if message is not None)
    # A client that only asks whether the server answers sends nothing at all.
    return conversation if items and conversation else [*conversation, Message("user", "")]


def _message(item: Item, where: str) -> Message | None:
    kind = item["type"]
    if kind not in ITEMS:
        raise RequestError(
            f"{where}.type = {shorten(kind)} is not implemented; send {', '.join(ITEMS)}",
            code="not_implemented",
            param=f"{where}.type",
        )
    match ITEMS[kind].parse(dict(item), where):
        case MessageItem() as message:
            role = "system" if message.role == "developer" else message.role
            return Message(role, _text(message.content, f"{where}.content"))
        case FunctionCallItem() as call:
            return Message("assistant", calls=(PriorCall(call.call_id, call.name, call.arguments),))
        case CustomCallItem() as call:
            arguments = json.dumps({CUSTOM_INPUT: call.input}, ensure_ascii=False)
            return Message("assistant", calls=(PriorCall(call.call_id, call.name, arguments),))
        case OutputItem() as output:
            return Message("tool", _text(output.output, f"{where}.output"), call_id=output.call_id)
        case ReasoningItem() as reasoning:
            thought = _reasoning(reasoning, where)
            return None if thought is None else Message("assistant", reasoning=thought)
    raise AssertionError(kind)


_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _text(value: object, where: str) -> str:
    """The text of a content."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(
            f"{where} must be a string or an array of parts, not {json_type(value)}", code="invalid_type", param=where
        )
    return joined(_part(part, f"{where}[{index}]") for index, part in enumerate(value)) or ""


def _part(value: object, where: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise RequestError(
            f'{where} must be a part like {{"type": "input_text", "text": "..."}}', code="invalid_value", param=where
        )
    if kind == "refusal" and isinstance(value.get("refusal"), str):
        return str(value["refusal"])
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f'{where}.type = "{shorten(kind)}" is not implemented; send text', code="not_implemented", param=where
        )
    if not isinstance(value.get("text"), str):
        raise RequestError(f"{where}.text must be a string", code="invalid_type", param=f"{where}.text")
    return str(value["text"])


def encode_reasoning(text: str) -> str:
    """Reasoning in the form of `encrypted_content`, for clients that send only that back. It is no secret."""
    return _ENCODED + base64.b64encode(text.encode()).decode()


def _reasoning(item: ReasoningItem, where: str) -> str | None:
    """The text of an item of reasoning; None for one of another server, which cannot be read."""
    if item.content:
        return _text(item.content, f"{where}.content")
    if item.encrypted_content is None or not item.encrypted_content.startswith(_ENCODED):
        return None
    try:
        return base64.b64decode(item.encrypted_content.removeprefix(_ENCODED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise RequestError(
            f"{where}.encrypted_content is damaged ({error}); leave the item out",
            code="invalid_value",
            param=f"{where}.encrypted_content",
        ) from None


@dataclass(frozen=True, slots=True)
class ReadTools:
    """The tools of a request. `custom`: the names of those whose input is a text. `shown`: what the response lists."""

    use: ToolUse = field(default_factory=ToolUse)
    custom: frozenset[str] = frozenset()
    shown: tuple[object, ...] = ()


def read_tools(body: ResponsesBody) -> ReadTools:
    """Raises RequestError."""
    tools: list[Tool] = []
    custom: set[str] = set()
    shown: list[object] = []
    for index, value in enumerate(body.tools or ()):
        kind = value.get("type") if isinstance(value, dict) else None
        where = f"tools[{index}]"
        if not isinstance(kind, str):
            raise RequestError(f"{where}.type must be a string", code="invalid_type", param=f"{where}.type")
        if kind in _LEFT_OUT:
            continue
        if kind == "function":
            function = FunctionTool.parse(value, where)
            strict = bool(function.strict)
            tools.append(Tool(function.name, function.description, function.parameters, strict, where))
        elif kind == "custom":
            tool = CustomTool.parse(value, where)
            custom.add(tool.name)
            tools.append(_as_function(tool, where))
        else:
            raise RequestError(
                f'{where}.type = "{shorten(kind)}" is not implemented (a tool that OpenAI runs, or unknown); send'
                " functions or custom tools",
                code="not_implemented",
                param=f"{where}.type",
            )
        shown.append(value)
    use = _with_choice(tuple(tools), body)
    return ReadTools(use, frozenset(custom), tuple(shown))


def _as_function(tool: CustomTool, where: str) -> Tool:
    form = None if tool.format is None else f"The form of the input: {json.dumps(tool.format, ensure_ascii=False)}"
    schema = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
    return Tool(tool.name, joined((tool.description, form)), schema, where=where)


def _with_choice(tools: tuple[Tool, ...], body: ResponsesBody) -> ToolUse:
    tool_choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if tool_choice is None:
        return ToolUse(tools, parallel=parallel)
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools":
        names = _names(tool_choice.get("tools"))
        if unknown := names - {tool.name for tool in tools}:
            raise _bad_choice(f"tools has no tool named {', '.join(map(shorten, sorted(unknown)))}")
        if not names:
            raise _bad_choice("allowed_tools needs tools")
        tools, tool_choice = tuple(tool for tool in tools if tool.name in names), tool_choice.get("mode")
    if isinstance(tool_choice, str) and tool_choice in ("auto", "none", "required"):
        if tool_choice == "required" and not tools:
            raise _bad_choice('"required" needs tools')
        return ToolUse(tools, ToolCalling(tool_choice), parallel=parallel)
    if isinstance(tool_choice, dict) and tool_choice.get("type") in ("function", "custom"):
        name = tool_choice.get("name")
        if name not in [tool.name for tool in tools]:
            raise _bad_choice(f"tools has no tool named {shorten(name)}")
        return ToolUse(tools, ToolCalling.NAMED, str(name), parallel)
    raise _bad_choice(
        'it must be "auto", "none", "required", a function or custom tool with its name, or allowed_tools'
    )


def _names(tools: object) -> set[str]:
    if not isinstance(tools, list):
        raise _bad_choice("allowed_tools needs an array of tools")
    return {tool["name"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)}


def _bad_choice(why: str) -> RequestError:
    return RequestError(f"tool_choice is refused: {why}", code="invalid_value", param="tool_choice")
