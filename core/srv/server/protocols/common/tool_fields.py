"""The fields of chat requests about tools and reasoning: those of the body, and those of its messages.

Source: OpenAI's API reference. Must not know how a reply is parsed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator

from srv.errors import RequestError
from srv.reply.output import MAX_CALL_ID, MAX_NAME
from srv.reply.tools import PriorCall, Tool, ToolCalling
from srv.server.request.fields import NoEffect, RequestBody, field_error, json_type, shorten

TOOL_NAME = r"^[A-Za-z0-9_.:/\-]+$"


class FunctionBody(RequestBody):
    name: str = Field(min_length=1, max_length=MAX_NAME, pattern=TOOL_NAME, description="What the model calls it.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, object] | None = Field(None, description="The JSON Schema of its arguments.")
    strict: bool | None = Field(None, description="The arguments follow the schema, by a grammar.")


class ToolBody(RequestBody):
    type: Literal["function"] = Field(description="The only kind of tool.")
    function: FunctionBody = Field(description="The function.")

    def tool(self, where: str) -> Tool:
        function = self.function
        return Tool(
            function.name, function.description, function.parameters, bool(function.strict), f"{where}.function"
        )


# Replies that OpenAI's clients parsed have it, and applications send them back as they are.
Parsed = Annotated[object, NoEffect("what the client read from the text beside it")]


class CalledFunction(RequestBody):
    name: str = Field(min_length=1, description="The function that was called.")
    arguments: str | None = Field(None, description="Its arguments, as the model wrote them, also if they are no JSON.")
    parsed_arguments: Parsed = None


class CallBody(RequestBody):
    id: str = Field(
        min_length=1, max_length=MAX_CALL_ID, description="Its id, which the message with its result repeats."
    )
    type: Literal["function"] = Field("function", description="The only kind of call.")
    function: CalledFunction = Field(description="What was called.")
    index: int | None = Field(None, description="The position, as streams have it.")

    def call(self) -> PriorCall:
        return PriorCall(self.id, self.function.name, self.function.arguments or "")


class AskedChoice(NamedTuple):
    """`name`: the function to call. `allowed`: the functions among which the model chooses; None: all of them."""

    choice: ToolCalling
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    def of(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        """Those that the model may call. Raises RequestError for an allowed function that is none of them."""
        if self.allowed is None:
            return tools
        names = [tool.name for tool in tools]
        for name in self.allowed:
            if name not in names:
                raise RequestError(
                    f"tool_choice allows the function {shorten(name)}, but the tools are {', '.join(names)}; allow"
                    " some of them",
                    code="invalid_value",
                    param="tool_choice",
                )
        return tuple(tool for tool in tools if tool.name in self.allowed)


_FORM = '{"type": "function", "function": {"name": "..."}}'
_ALLOWED_FORM = f'{{"type": "allowed_tools", "allowed_tools": {{"mode": "auto" or "required", "tools": [{_FORM}]}}}}'


def _tool_choice(value: object) -> AskedChoice | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise field_error("invalid_value", 'must be "none", "auto", "required", or an object that names a function')
        return AskedChoice(ToolCalling(value))
    if not isinstance(value, dict):
        raise field_error("invalid_type", f"must be a string or an object, not {json_type(value)}")
    if value.get("type") == "allowed_tools":
        return _allowed(value)
    name = _function_name(value)
    if name is None:
        raise field_error("invalid_value", f"must have the form {_FORM}, not {shorten(value)}")
    return AskedChoice(ToolCalling.NAMED, name)


def _allowed(value: dict[str, Any]) -> AskedChoice:
    inner = value.get("allowed_tools")
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
    names = [_function_name(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    allowed_names = tuple(name for name in names if name is not None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not 0 < len(allowed_names) == len(tools):
        raise field_error("invalid_value", f"must have the form {_ALLOWED_FORM}")
    return AskedChoice(ToolCalling(mode), allowed=allowed_names)


def _function_name(value: dict[str, Any]) -> str | None:
    function = value.get("function")
    if value.keys() != {"type", "function"} or value["type"] != "function" or not isinstance(function, dict):
        return None
    name = function.get("name")
    return name if function.keys() == {"name"} and isinstance(name, str) and name else None


ToolChoice = Annotated[
    AskedChoice | None,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, object] | None),
]
