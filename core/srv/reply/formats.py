"""The format of the replies of one model: rows found by name, or chosen by the model's chat template.

Owns the tables, with the rows of other distributions, and the choice. Must not know requests or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from srv.errors import RequestError
from srv.platform.extensions import Extensions, contested
from srv.reply.checks import fault_of
from srv.reply.forced import CallConstraint, constraint_of
from srv.reply.parser import ParserOptions, ReplyParser
from srv.reply.reasoning_rows import CHANNEL_ROWS, REASONING_ROWS
from srv.reply.rows import ChannelFormat, ReasoningFormat, ToolFormat
from srv.reply.tool_rows import TOOL_ROWS
from srv.reply.tool_schemas import fault_of_schema
from srv.reply.tools import ToolUse

TOOL_GROUP, REASONING_GROUP = "srv.tool_formats", "srv.reasoning_formats"
_PAGE = "docs/reply-formats.md"
_TYPES: dict[str, type | tuple[type, ...]] = {"name": str, "aliases": tuple, "templates": tuple}
TOOL_EXTENSIONS = Extensions(
    TOOL_GROUP,
    ToolFormat,
    "tool format",
    _PAGE,
    types={**_TYPES, "bodies": tuple, "unmarked": bool, "ids": str, "trigger": str, "one_call": bool},
)
REASONING_EXTENSIONS = Extensions(
    REASONING_GROUP, ReasoningFormat, "reasoning format", _PAGE, types={**_TYPES, "marks": tuple, "always": bool}
)
NONE = "none"  # as the name of a format: the reply is text

Row = TypeVar("Row", bound=ToolFormat | ReasoningFormat)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the served model writes replies. `channels` stands for both others.

    `reasons`: why these rows were chosen, a sentence each, for the log.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    channels: ChannelFormat | None = None
    reasons: tuple[str, ...] = ()

    def parser(self, options: ParserOptions, prompt: str, calls_before: int = 0) -> ReplyParser | None:
        """A parser for one reply to `prompt`; None if the reply is nothing but text.

        calls_before: see `srv.reply.tools.count_calls`.
        """
        if not self.parses(options):
            return None
        return ReplyParser(self.tools, self.reasoning, self.channels, options, prompt=prompt, calls_before=calls_before)

    def parses(self, options: ParserOptions) -> bool:
        calls = options.use.active and self.tools is not None
        return self.channels is not None or calls or (self.reasoning is not None and options.separate_reasoning)

    def markers(self, options: ParserOptions) -> tuple[str, ...]:
        """What must stay in the text of a reply although special tokens are skipped."""
        if not self.parses(options):
            return ()
        if self.channels is not None:
            return self.channels.markers
        calls = self.tools.markers if self.tools is not None and options.use.active else ()
        return (*calls, *(self.reasoning.markers if self.reasoning is not None else ()))

    def check(self, use: ToolUse) -> None:
        """Raises RequestError for tools that this server cannot let the model call as asked."""
        _check_names(use)
        _check_schemas(use)
        if not use.active:
            return
        if self.tools is None and self.channels is None:
            raise RequestError(
                "tools is refused: the format of this model's tool calls is not known, because its chat template is"
                " none of those in the list of formats; start the server with --tool-call-parser NAME, or send"
                ' tool_choice = "none"',
                code="no_tool_format",
                param="tools",
            )

    def constraint(self, use: ToolUse, calls_before: int) -> CallConstraint | None:
        """What the reply must follow because of `use`; None if it is free. Raises RequestError."""
        row = self.channels or self.tools
        return None if row is None else constraint_of(row, use, calls_before)

    def reasoning_end(self, prompt: str, continued: bool = False) -> str:
        """The marker behind which a grammar begins, in a reply that starts with reasoning; "" in any other.

        `continued`: as in `ParserOptions`.
        """
        row = self.reasoning if self.channels is None else None
        return row.marks.end[0] if row is not None and row.starts_inside(prompt, continued) else ""


def _check_names(use: ToolUse) -> None:
    names = [tool.name for tool in use.tools]
    for index, tool in enumerate(use.tools):
        if tool.name in names[:index]:
            raise RequestError(
                f"{tool.where}.name = {tool.name} is refused: an earlier tool has the same name; rename one",
                code="invalid_value",
                param=f"{tool.where}.name",
            )
    if not names and use.forced:
        raise RequestError(
            f"tool_choice = {use.choice} is refused: the request has no tools; send tools too",
            code="invalid_value",
            param="tool_choice",
        )
    if use.name is not None and use.name not in names:
        raise RequestError(
            f"tool_choice names the function {use.name}, but the tools are {', '.join(names)}; name one of them",
            code="invalid_value",
            param="tool_choice",
        )


def _check_schemas(use: ToolUse) -> None:
    for tool in use.tools:
        if fault := fault_of_schema(tool.parameters or {}):
            param = f"{tool.where}.{tool.schema_field}"
            raise RequestError(
                f"{param}{fault.place} is refused: it {fault.problem}; correct the schema",
                code="invalid_value",
                param=param,
            )


TEXT_ONLY = ReplyFormat()
TOOL_NAMES = (*(row.name for row in TOOL_ROWS), *(row.name for row in CHANNEL_ROWS), NONE)
REASONING_NAMES = (*(row.name for row in REASONING_ROWS), *(row.name for row in CHANNEL_ROWS), NONE)


def synonyms(rows: Iterable[ToolFormat | ReasoningFormat | ChannelFormat]) -> tuple[tuple[str, str], ...]:
    """Pairs of an alias and the name that it stands for."""
    return tuple((alias, row.name) for row in rows for alias in row.aliases)


TOOL_SYNONYMS = synonyms((*TOOL_ROWS, *CHANNEL_ROWS))
REASONING_SYNONYMS = synonyms((*REASONING_ROWS, *CHANNEL_ROWS))


def find_channels(name: str) -> ChannelFormat | None:
    return next((row for row in CHANNEL_ROWS if name in (row.name, *row.aliases)), None)


def find_tool_format(name: str) -> ToolFormat | None:
    """As `_find`, among the formats of tool calls."""
    return _find(name, TOOL_ROWS, TOOL_EXTENSIONS)


def find_reasoning_format(name: str) -> ReasoningFormat | None:
    """As `_find`, among the formats of reasoning."""
    return _find(name, REASONING_ROWS, REASONING_EXTENSIONS)


def _find(name: str, rows: tuple[Row, ...], extensions: Extensions[Row]) -> Row | None:
    """The row of this name or alias. Raises PluginError for a faulty row of another distribution."""
    built_in: Row | None = None
    for row in rows:
        if name in (row.name, *row.aliases):
            built_in = row
    return _added(name, extensions, taken=built_in is not None or find_channels(name) is not None) or built_in


def _added(name: str, extensions: Extensions[Row], *, taken: bool = False) -> Row | None:
    """The row of another distribution, which is right; or None. `taken`: as in `Extensions.find`."""
    row = extensions.find(name, taken=taken)
    if row is not None and (fault := fault_of(row)) is not None:
        raise extensions.error_in(extensions.provider(name), f"{name}.{fault[0]}", fault[1])
    return row


def choose(tools: str | None, reasoning: str | None, templates: Sequence[str]) -> ReplyFormat:
    """The format of the replies. Names that are None are chosen by the chat templates; "none" stands for no row.

    The names must exist. Raises PluginError for a faulty row of another distribution.
    """
    source = "\n".join(templates)
    tool_row, tool_why = _chosen(tools, "--tool-call-parser", source, TOOL_ROWS, TOOL_EXTENSIONS)
    reasoning_row, reasoning_why = _chosen(
        reasoning, "--reasoning-parser", source, REASONING_ROWS, REASONING_EXTENSIONS
    )
    channels, channels_why = _chosen_channels(tools, reasoning, source)
    if channels is not None:
        return ReplyFormat(channels=channels, reasons=(channels_why,))
    return ReplyFormat(tool_row, reasoning_row, None, tuple(why for why in (tool_why, reasoning_why) if why))


def _chosen(
    name: str | None, flag: str, source: str, rows: tuple[Row, ...], extensions: Extensions[Row]
) -> tuple[Row | None, str]:
    if name == NONE:
        return None, ""
    noun = extensions.noun
    if name is not None:
        return _find(name, rows, extensions), f"{noun} {name}: set by {flag}"
    fitting = [other for other in extensions.names() if _fit_of(_added(other, extensions), source)]
    if len(fitting) > 1:
        owners = [extensions.provider(other) for other in fitting]
        raise contested(f"{noun}s {' and '.join(fitting)}", owners, "the same chat template")
    if fitting:
        added = _added(fitting[0], extensions)
        return added, _why(noun, fitting[0], _fit_of(added, source))
    best = max(rows, key=lambda row: len(_fit_of(row, source)))
    reasons = _fit_of(best, source)
    return (best, _why(noun, best.name, reasons)) if reasons else (None, "")


def _chosen_channels(tools: str | None, reasoning: str | None, source: str) -> tuple[ChannelFormat | None, str]:
    for name, flag in ((tools, "--tool-call-parser"), (reasoning, "--reasoning-parser")):
        if name is not None and (channels := find_channels(name)) is not None:
            return channels, f"tool and reasoning format {channels.name}: set by {flag}"
    if tools is None and reasoning is None:
        for row in CHANNEL_ROWS:
            if reasons := _fit_of(row, source):
                return row, _why("tool and reasoning format", row.name, reasons)
    return None, ""


def _fit_of(row: ToolFormat | ReasoningFormat | ChannelFormat | None, source: str) -> tuple[str, ...]:
    """The longest alternative, in strings, that the chat template contains completely; () if there is none."""
    templates = () if row is None else row.templates
    fitting = [strings for strings in templates if all(text in source for text in strings)]
    return max(fitting, key=lambda strings: (len(strings), sum(map(len, strings))), default=())


def _why(noun: str, name: str, markers: tuple[str, ...]) -> str:
    return f"{noun} {name}: chosen because the chat template contains {' and '.join(markers)}"
