"""The tools that Anthropic defines and clients run: an ordinary tool each, with a name and a schema that are fixed.

Sources: Anthropic's API reference and SDK. Claude models are trained for them; the descriptions tell other models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from srv.errors import RequestError
from srv.reply.output import MAX_NAME
from srv.reply.tools import Tool
from srv.server.request.fields import NoEffect, Refused, RequestBody, shorten

Schema = Mapping[str, Any]


class ClientTool(NamedTuple):
    """Name and schema of a tool that clients run. `required`: the properties that each call must have."""

    name: str
    description: str
    properties: Mapping[str, Schema]
    required: tuple[str, ...] = ()


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _command(*names: str) -> Schema:
    return {"type": "string", "enum": list(names), "description": "What to do."}


_LINE: Schema = {"type": "integer", "description": "For insert: the line after which the text goes; 0: at the start."}
_RANGE: Schema = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For view: the first and the last line to show, counted from 1; -1 is the end of the file.",
}
_OLD = _text("For str_replace: the text to replace, which must occur exactly once.")
_NEW = _text("For str_replace: the text that replaces it.")
_CONTENT = _text("For create: the content of the file.")
_EDITS: Mapping[str, Schema] = {
    "path": _text("The path of the file or folder."),
    "view_range": _RANGE,
    "file_text": _CONTENT,
    "old_str": _OLD,
    "new_str": _NEW,
    "insert_line": _LINE,
}
_INSERT_TEXT = {"insert_text": _text("For insert: the text to insert.")}
_BASH = ClientTool(
    "bash",
    "Run commands in a shell that keeps its state between calls.",
    {
        "command": _text("The command to run; it may be missing only with restart."),
        "restart": {"type": "boolean", "description": "true: start the shell anew."},
    },
)
_EDITOR = ClientTool(
    "str_replace_based_edit_tool",
    "View, create and edit text files.",
    {"command": _command("view", "create", "str_replace", "insert"), **_EDITS, **_INSERT_TEXT},
    ("command", "path"),
)
CLIENT_TOOLS: Mapping[str, ClientTool] = {
    "bash_20250124": _BASH,
    "text_editor_20250124": ClientTool(
        "str_replace_editor",
        "View, create and edit text files. undo_edit takes back the last edit of a file.",
        {
            "command": _command("view", "create", "str_replace", "insert", "undo_edit"),
            **_EDITS,
            "new_str": _text("For str_replace: the text that replaces the old one; for insert: the text to insert."),
        },
        ("command", "path"),
    ),
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": ClientTool(
        "memory",
        "Keep notes in files below /memories, which later conversations can read.",
        {
            "command": _command("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            **_INSERT_TEXT,
            "old_path": _text("For rename: the path as it is."),
            "new_path": _text("For rename: the path as it is to be."),
        },
        ("command",),
    ),
}


class ClientToolBody(RequestBody):
    type: str = Field(description=", ".join(CLIENT_TOOLS))
    name: str = Field(min_length=1, max_length=MAX_NAME, description="The name that belongs to the type.")
    strict: bool | None = Field(None, description="The arguments must follow the schema.")
    max_characters: Annotated[int | None, NoEffect("the client, which shows the file, cuts it")] = None
    cache_control: Annotated[dict[str, object] | None, NoEffect("the prefix cache keeps every prompt")] = None
    defer_loading: Annotated[object, NoEffect("the prompt describes all tools")] = None
    eager_input_streaming: Annotated[object, NoEffect("arguments are streamed as they are generated")] = None
    allowed_callers: Annotated[object, NoEffect("calls come from the model alone")] = None
    input_examples: Annotated[object, Refused("examples of arguments; put them into the system prompt")] = None


def client_tool(value: object, kind: str, where: str) -> Tool:
    """The tool of a valid body. `kind`: its type, which `CLIENT_TOOLS` has. Raises RequestError."""
    body, definition = ClientToolBody.parse(value, where), CLIENT_TOOLS[kind]
    if body.name != definition.name:
        raise RequestError(
            f'{where}.name = "{shorten(body.name)}" is refused: a tool of the type {kind} is called {definition.name};'
            " send that name, or a tool with input_schema",
            code="invalid_value",
            param=f"{where}.name",
        )
    schema = {
        "type": "object",
        "properties": dict(definition.properties),
        "required": list(definition.required),
        "additionalProperties": False,
    }
    return Tool(definition.name, definition.description, schema, bool(body.strict), where, "type")
