"""The grammar of replies that must have calls, or whose calls must follow the schemas of strict tools.

Owns which text a call has in a format, as a structural tag: free text in which parts are constrained. Must not know how
a grammar is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from srv.errors import RequestError
from srv.reply.rows import ChannelFormat, ToolFormat
from srv.reply.tools import Choice, Tool, ToolUse


class Constraint(NamedTuple):
    """`tag`: a structural tag. `param`: the field of the request that asks for it."""

    tag: dict[str, Any]
    param: str


def constraint_of(row: ToolFormat | ChannelFormat, use: ToolUse, calls_before: int) -> Constraint | None:
    """What the reply must follow; None if it is free. Raises RequestError if the format has no such grammar.

    calls_before: the number of calls in the conversation.
    """
    strict = next((tool for tool in use.tools if tool.strict), None)
    if not use.active or (use.choice is Choice.AUTO and strict is None):
        return None
    param = "tool_choice" if strict is None or use.choice is not Choice.AUTO else f"{strict.where}.strict"
    begin, end = row.frame
    if not begin or (use.choice is Choice.AUTO and not row.trigger):
        raise RequestError(
            f"{param} is refused: calls in the format {row.name} cannot be constrained by a grammar; send"
            ' tool_choice = "auto" and tools that are not strict',
            code="not_implemented",
            param=param,
        )
    if use.choice is Choice.AUTO:
        tags = [_tag(tool, begin, end, calls_before, tool.strict) for tool in use.tools]
        free = {"type": "triggered_tags", "triggers": [row.trigger], "tags": tags}
        return Constraint(_structural({**free, "stop_after_first": not use.parallel}), param)
    tools = [tool for tool in use.tools if use.named in (None, tool.name)]
    tags = [_tag(tool, begin, end, calls_before, True) for tool in tools]
    one = use.choice is Choice.NAMED or not use.parallel or row.one_call
    form = {"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": True}
    return Constraint(_structural({**form, "stop_after_first": one}), param)


def _structural(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def _tag(tool: Tool, begin: str, end: str, index: int, follows_schema: bool) -> dict[str, Any]:
    """One call. `index`: the position in the conversation that its id has, if the model writes ids."""
    schema = dict(tool.parameters or {}) if follows_schema else {}
    content = {"type": "json_schema", "json_schema": {**schema, "type": "object"}}
    filled = begin.replace("{name}", tool.name).replace("{index}", str(index))
    return {"type": "tag", "begin": filled, "content": content, "end": end}
