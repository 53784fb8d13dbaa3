"""Anthropic's messages and tools in the form that all protocols share.

Must not know how a prompt is rendered or a reply is generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from srv.errors import RequestError
from srv.reply.tools import Message, PriorCall, Tool, ToolCalling, ToolUse
from srv.server.protocols.anthropic.fields import (
    BLOCKS,
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    ContentSource,
    CountTokensBody,
    DocumentBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from srv.server.protocols.anthropic.tools import CLIENT_TOOLS, client_tool
from srv.server.protocols.common.conversations import Conversation, joined, merged
from srv.server.request.fields import RequestBody, json_type, shorten

# Claude Code's first system block, which is different in every request: no cached prefix would fit after it.
BILLING_HEADER = "x-anthropic-billing-header:"
_ROLES = {"ctx": "user", "msg": "user"}
_IN_SYSTEM = ("text",)
_IN_RESULT = ("text", "tool_reference", "document")
_IN_USER = ("text", "tool_result", "document")
_IN_ASSISTANT = ("text", "thinking", "redacted_thinking", "tool_use")
_CHOICES = {
    "auto": ToolCalling.AUTO,
    "any": ToolCalling.REQUIRED,
    "tool": ToolCalling.NAMED,
    "none": ToolCalling.NONE,
}
_BY_ROLE = {"user": _IN_USER, "assistant": _IN_ASSISTANT, "system": _IN_SYSTEM}


def read_conversation(body: CountTokensBody) -> Conversation:
    """The conversation of a valid body. Raises RequestError that names the block at fault."""
    messages: list[Message] = []
    if body.system is not None:
        texts = [block.text for block in _blocks(body.system, "system", _IN_SYSTEM) if isinstance(block, TextBlock)]
        system_texts = [text for text in texts if not text.startswith(BILLING_HEADER)]
        if system_texts:
            messages.append(Message("system", joined(system_texts)))
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}].content")
    return Conversation(merged(messages), read_tools(body), _variables(body), continued=True)


def _variables(body: CountTokensBody) -> Mapping[str, object]:
    """Templates of models that can think either way read `enable_thinking`, or `thinking` (DeepSeek's)."""
    if body.thinking is None:
        return {}
    thinks = body.thinking.type != "disabled"
    return {"enable_thinking": thinks, "thinking": thinks}


def _messages(message: AnthropicMessage, where: str) -> list[Message]:
    role = _ROLES.get(message.role, message.role)
    blocks = _blocks(message.content, where, _BY_ROLE[role])
    text = joined(block.text for block in blocks if isinstance(block, TextBlock))
    if role == "assistant":
        reasoning = joined(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        calls = tuple(
            PriorCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            for block in blocks
            if isinstance(block, ToolUseBlock)
        )
        return [Message(role, text, reasoning=reasoning, calls=calls)]
    results = [
        _result(block, f"{where}[{index}].content")
        for index, block in enumerate(blocks)
        if isinstance(block, ToolResultBlock)
    ]
    return [*results, *([Message(role, text)] if text is not None or not results else [])]


def _result(block: ToolResultBlock, where: str) -> Message:
    texts: list[str] = []
    for part in _blocks("" if block.content is None else block.content, where, _IN_RESULT):
        match part:
            case TextBlock():
                texts.append(part.text)
            case ToolReferenceBlock():
                texts.append(part.tool_name)
    return Message("tool", joined(texts) or "", call_id=block.tool_use_id)


def _blocks(value: object, where: str, allowed: tuple[str, ...]) -> list[RequestBody]:
    """The blocks of a content, which may be a text. `allowed`: the types that may occur there."""
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    if not isinstance(value, list):
        raise RequestError(
            f"{where} must be a string or an array of blocks, not {json_type(value)}", code="invalid_type", param=where
        )
    return [_block(item, f"{where}[{index}]", allowed) for index, item in enumerate(value)]


def _block(value: object, where: str, allowed: tuple[str, ...]) -> RequestBody:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise RequestError(
            f'{where} must be a block like {{"type": "text", "text": "..."}}', code="invalid_value", param=where
        )
    if kind not in allowed:
        known = kind in BLOCKS
        problem = f"does not belong there; send {' or '.join(allowed)}" if known else "is not implemented; send text"
        raise RequestError(
            f'{where}.type = "{shorten(kind)}" is refused: a block of this type {problem}',
            code="invalid_value" if known else "not_implemented",
            param=f"{where}.type",
        )
    block = BLOCKS[kind].parse(value, where)
    return TextBlock(type="text", text=_document(block, where)) if isinstance(block, DocumentBlock) else block


def _document(block: DocumentBlock, where: str) -> str:
    """The text of a document, after its title and context."""
    source = block.source
    match source.get("type") if isinstance(source, dict) else None:
        case "text":
            texts = [TextSource.parse(source, f"{where}.source").data]
        case "content":
            content = ContentSource.parse(source, f"{where}.source").content
            blocks = _blocks(content, f"{where}.source.content", _IN_SYSTEM)
            texts = [text_block.text for text_block in blocks if isinstance(text_block, TextBlock)]
        case kind:
            raise RequestError(
                f'{where}.source.type = "{shorten(kind)}" is not implemented; send plain text as type text or content',
                code="not_implemented",
                param=f"{where}.source.type",
            )
    return joined((block.title, block.context, *texts)) or ""


def read_tools(body: CountTokensBody) -> ToolUse:
    """The tools of a body, and which may be called. Raises RequestError."""
    tools = tuple(_tool(value, f"tools[{index}]") for index, value in enumerate(body.tools or ()))
    tool_choice = body.tool_choice
    if tool_choice is None:
        return ToolUse(tools)
    _check_choice(tool_choice, tools)
    choice, several = _CHOICES[tool_choice.type], not tool_choice.disable_parallel_tool_use
    return ToolUse(tools, choice, tool_choice.name if choice is ToolCalling.NAMED else None, several)


def _tool(value: object, where: str) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in CLIENT_TOOLS:
        return client_tool(value, kind, where)
    if isinstance(kind, str) and kind != "custom":
        raise RequestError(
            f'{where}.type = "{shorten(kind)}" is not implemented (a tool that Anthropic defines); send a tool with'
            " name, description and input_schema, or one of the types"
            f" {', '.join(CLIENT_TOOLS)}",
            code="not_implemented",
            param=f"{where}.type",
        )
    tool = AnthropicTool.parse(value, where)
    schema = {"type": "object", **tool.input_schema}
    return Tool(tool.name, tool.description, schema, bool(tool.strict), where, "input_schema")


def _check_choice(choice: AnthropicToolChoice, tools: tuple[Tool, ...]) -> None:
    if choice.type == "tool" and choice.name not in {tool.name for tool in tools}:
        shown = "missing" if choice.name is None else f'"{shorten(choice.name)}", which tools does not have'
        raise RequestError(
            f"tool_choice.name is {shown}; name one of the tools", code="invalid_value", param="tool_choice.name"
        )
    if choice.type == "any" and not tools:
        raise RequestError(
            'tool_choice.type = "any" is refused: it needs tools; send some, or "auto"',
            code="invalid_value",
            param="tool_choice.type",
        )
