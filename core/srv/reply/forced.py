"""The grammar of replies that must have calls, or whose calls must follow the schemas of strict tools.

Owns which text a call has in a format, as a structural tag: free text in which parts are constrained. Must not know how
a grammar is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from srv.errors import RequestError
from srv.reply.forced_arguments import arguments_of
from srv.reply.rows import BareBody, ChannelFormat, PythonBody, TaggedBody, ToolFormat
from srv.reply.tools import Tool, ToolCalling, ToolUse


class CallConstraint(NamedTuple):
    """`tag`: a structural tag. `param`: the field of the request that asks for it. `left_out`: keywords of schemas that
    are not strict and that it does not have."""

    tag: dict[str, Any]
    param: str
    left_out: tuple[str, ...] = ()


class _Call(NamedTuple):
    tag: dict[str, Any]
    left_out: tuple[str, ...] = ()


def constraint_of(row: ToolFormat | ChannelFormat, use: ToolUse, calls_before: int) -> CallConstraint | None:
    """What the reply must follow; None if it is free. Raises RequestError if the format has no such grammar.

    calls_before: the number of calls in the conversation.
    """
    strict = next((tool for tool in use.tools if tool.strict), None)
    if not use.active or (use.choice is ToolCalling.AUTO and strict is None):
        return None
    param = "tool_choice" if strict is None or use.choice is not ToolCalling.AUTO else f"{strict.where}.strict"
    if not row.frame[0] or (use.choice is ToolCalling.AUTO and not row.trigger):
        raise RequestError(
            f"{param} is refused: calls in the format {row.name} cannot be constrained by a grammar; send"
            ' tool_choice = "auto" and tools that are not strict',
            code="not_implemented",
            param=param,
        )
    auto = use.choice is ToolCalling.AUTO
    tools = [tool for tool in use.tools if use.name in (None, tool.name)]
    calls = [_call(row, tool, calls_before, tool.strict or not auto) for tool in tools]
    form: dict[str, Any] = {"tags": [call.tag for call in calls]}
    if auto:
        form |= {"type": "triggered_tags", "triggers": [row.trigger], "stop_after_first": not use.parallel}
    else:
        one = use.choice is ToolCalling.NAMED or not use.parallel or row.one_call
        form |= {"type": "tags_with_separator", "separator": "", "at_least_one": True, "stop_after_first": one}
    left_out = dict.fromkeys(keyword for call in calls for keyword in call.left_out)
    return CallConstraint({"type": "structural_tag", "format": form}, param, tuple(left_out))


def _call(row: ToolFormat | ChannelFormat, tool: Tool, index: int, follows_schema: bool) -> _Call:
    """One call. `index`: the position in the conversation that its id has, if the model writes ids."""
    begin, end = row.frame
    begin = begin.replace("{name}", tool.name).replace("{index}", str(index))
    bodies = row.bodies if isinstance(row, ToolFormat) else ()
    body = next((body for body in bodies if isinstance(body, TaggedBody | PythonBody | BareBody)), None)
    if body is None:
        return _Call({"type": "tag", "begin": begin, "content": _json(tool, follows_schema), "end": end})
    if not follows_schema:
        return _Call({"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end})
    arguments = arguments_of(body, tool, row.markers)
    if tool.strict and arguments.left_out:
        param = f"{tool.where}.{tool.schema_field}"
        raise RequestError(
            f"{param} is refused: {arguments.left_out[0]!r} cannot be enforced in calls of the format {row.name}, and"
            " the tool is strict; leave it out, or send the tool without strict",
            code="not_implemented",
            param=param,
        )
    if not arguments.elements:
        return _Call(
            {"type": "tag", "begin": begin, "content": {"type": "const_string", "value": end}, "end": ""},
            arguments.left_out,
        )
    content = {"type": "sequence", "elements": arguments.elements}
    return _Call({"type": "tag", "begin": begin, "content": content, "end": end}, arguments.left_out)


def _json(tool: Tool, follows_schema: bool) -> dict[str, Any]:
    schema = dict(tool.parameters or {}) if follows_schema else {}
    content: dict[str, Any] = {"type": "json_schema", "json_schema": {**schema, "type": "object"}}
    return content if tool.strict else {**content, "strict": False}  # what no grammar can enforce is left out
