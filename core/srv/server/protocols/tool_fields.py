"""The fields of chat requests about tools and reasoning: those of the body, and those of its messages.

Source: OpenAI's API reference. Must not know how a reply is parsed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from srv.reply.tools import Choice, PriorCall, Tool
from srv.server.fields import NoEffect, RequestBody, field_error, json_type, shorten

TOOL_NAME = r"^[A-Za-z0-9_.:/\-]+$"


class FunctionBody(RequestBody):
    name: str = Field(min_length=1, max_length=256, pattern=TOOL_NAME, description="What the model calls it.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, object] | None = Field(None, description="The JSON Schema of its arguments.")
    strict: bool | None = Field(None, description="The arguments follow the schema, by a grammar.")


class ToolBody(RequestBody):
    type: Literal["function"] = Field(description="The only kind of tool.")
    function: FunctionBody = Field(description="The function.")

    def tool(self) -> Tool:
        given = self.function
        return Tool(given.name, given.description, given.parameters, bool(given.strict))


# Replies that OpenAI's clients parsed have it, and applications send them back as they are.
Parsed = Annotated[object, NoEffect("what the client read from the text beside it")]


class CalledFunction(RequestBody):
    name: str = Field(min_length=1, description="The function that was called.")
    arguments: str | None = Field(None, description="Its arguments, as the text of a JSON object.")
    parsed_arguments: Parsed = None


class CallBody(RequestBody):
    id: str = Field(min_length=1, max_length=256, description="Its id, which the message with its result repeats.")
    type: Literal["function"] = Field("function", description="The only kind of call.")
    function: CalledFunction = Field(description="What was called.")
    index: int | None = Field(None, description="The position, as streams have it.")

    def call(self) -> PriorCall:
        return PriorCall(self.id, self.function.name, self.function.arguments or "")


def _tool_choice(value: object) -> tuple[Choice, str | None] | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise field_error("invalid_value", 'must be "none", "auto", "required", or an object that names a function')
        return Choice(value), None
    if not isinstance(value, dict):
        raise field_error("invalid_type", f"must be a string or an object, not {json_type(value)}")
    name = _named(value)
    if name is None:
        expected = '{"type": "function", "function": {"name": "..."}}'
        raise field_error("invalid_value", f"must have the form {expected}, not {shorten(value)}")
    return Choice.NAMED, name


def _named(value: dict[str, Any]) -> str | None:
    function = value.get("function")
    if value.keys() != {"type", "function"} or value["type"] != "function" or not isinstance(function, dict):
        return None
    name = function.get("name")
    return name if function.keys() == {"name"} and isinstance(name, str) and name else None


ToolChoice = Annotated[
    tuple[Choice, str | None] | None,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, object] | None),
]
