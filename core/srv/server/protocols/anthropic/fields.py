"""The fields of the bodies of `/v1/messages` and `/v1/messages/count_tokens`, and of the objects in them.

Sources: Anthropic's API reference, and the requests of Claude Code. Must not know how a request is served.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field

from srv.limits import MAX_TOKENS
from srv.reply.output import MAX_CALL_ID, MAX_NAME
from srv.server.http.error_shapes import THREADS
from srv.server.protocols.common.tool_fields import TOOL_NAME
from srv.server.request.fields import NoEffect, Refused, RequestBody
from srv.server.request.grammar_fields import OutputFormat
from srv.server.request.sampling_fields import NamedBody, Salt, SamplesTokens, namespace_of, sampling_body

CacheControl = Annotated[
    dict[str, object] | None, NoEffect("the prefix cache keeps every prompt; there are no breakpoints")
]
Label = Annotated[str | None, NoEffect("it says where Anthropic runs its models, and for whom")]
SERVER_SIDE = Refused("it runs on Anthropic's servers")


class TextBlock(RequestBody):
    type: Literal["text"] = Field(description="text")
    text: str = Field(description="The text.")
    cache_control: CacheControl = None
    citations: Annotated[object, NoEffect("citations of earlier replies are not part of the prompt")] = None


class ThinkingBlock(RequestBody):
    """Reasoning of an earlier reply. Signatures are not checked: every client may send any prompt anyway."""

    type: Literal["thinking"] = Field(description="thinking")
    thinking: str = Field(description="The reasoning.")
    signature: Annotated[str | None, NoEffect("reasoning is accepted from any client")] = None
    cache_control: CacheControl = None


class RedactedThinkingBlock(RequestBody):
    type: Literal["redacted_thinking"] = Field(description="redacted_thinking")
    data: Annotated[str, NoEffect("only Anthropic can read it; it is left out of the prompt")]
    cache_control: CacheControl = None


class ToolUseBlock(RequestBody):
    type: Literal["tool_use"] = Field(description="tool_use")
    id: str = Field(min_length=1, max_length=MAX_CALL_ID, description="The id of the call.")
    name: str = Field(min_length=1, max_length=MAX_NAME, description="The name of the tool.")
    input: dict[str, object] = Field(description="The arguments of the call.")
    cache_control: CacheControl = None
    caller: Annotated[object, NoEffect("calls come from the model alone")] = None


class ToolResultBlock(RequestBody):
    type: Literal["tool_result"] = Field(description="tool_result")
    tool_use_id: str = Field(min_length=1, max_length=MAX_CALL_ID, description="The id of the call.")
    content: object = Field(None, description="The result: a text, or an array of blocks of text.")
    is_error: Annotated[bool | None, NoEffect("chat templates have no place for it; the content says what failed")] = (
        None
    )
    cache_control: CacheControl = None


class ToolReferenceBlock(RequestBody):
    type: Literal["tool_reference"] = Field(description="tool_reference")
    tool_name: str = Field(max_length=MAX_NAME, description="A tool that a search found.")
    cache_control: CacheControl = None


class Citations(RequestBody):
    enabled: Literal[False] | None = Field(None, description="false; a reply cites no document.")


class DocumentBlock(RequestBody):
    type: Literal["document"] = Field(description="document")
    source: object = Field(description="Its text: of type text with data, or of type content with blocks of text.")
    title: str | None = Field(None, description="Its title, in a line before the text.")
    context: str | None = Field(None, description="What the model should know about it, in a line before the text.")
    citations: Citations | None = Field(None, description="Only that they are not enabled.")
    cache_control: CacheControl = None


class TextSource(RequestBody):
    type: Literal["text"] = Field(description="text")
    media_type: Literal["text/plain"] = Field(description="text/plain")
    data: str = Field(description="The text.")


class ContentSource(RequestBody):
    type: Literal["content"] = Field(description="content")
    content: object = Field(description="A text, or an array of blocks of text.")


BLOCKS: dict[str, type[RequestBody]] = {
    "document": DocumentBlock,
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "tool_reference": ToolReferenceBlock,
}


class AnthropicMessage(RequestBody):
    role: Literal["user", "assistant", "system", "ctx", "msg"] = Field(
        description="user or assistant; Claude Code also sends system, and ctx and msg, which are user messages."
    )
    content: object = Field(description="A text, or an array of blocks.")


class AnthropicTool(RequestBody):
    name: str = Field(min_length=1, max_length=MAX_NAME, pattern=TOOL_NAME, description="The name of the tool.")
    description: str | None = Field(None, description="What the tool does.")
    input_schema: dict[str, object] = Field(description="The JSON Schema of the arguments.")
    strict: bool | None = Field(None, description="The arguments must follow the schema.")
    type: Literal["custom"] | None = Field(None, description="custom, the default.")
    cache_control: CacheControl = None
    defer_loading: Annotated[object, NoEffect("the prompt describes all tools")] = None
    eager_input_streaming: Annotated[object, NoEffect("arguments are streamed as they are generated")] = None
    input_examples: Annotated[object, Refused("examples of arguments; put them into the description")] = None
    allowed_callers: Annotated[object, NoEffect("calls come from the model alone")] = None


class AnthropicToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"] = Field(description="auto, any (at least one call), tool, or none.")
    name: str | None = Field(None, max_length=MAX_NAME, description="The tool to call; only with tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call.")


class Thinking(RequestBody):
    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="Whether the model thinks before it answers, if its chat template lets requests choose."
    )
    budget_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="After this many tokens, the reasoning ends, if its format is known."
    )
    display: Annotated[object, NoEffect("reasoning is returned as it is")] = None


class OutputConfig(RequestBody):
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        NoEffect("a hint, which models other than Anthropic's do not know"),
    ] = None
    format: OutputFormat = Field(None, description="The JSON schema that the reply follows.")
    task_budget: Annotated[object, Refused("budgets of tasks")] = None


class ContextEdit(RequestBody):
    type: Literal["clear_thinking_20251015"] = Field(description="Which earlier reasoning the prompt keeps.")
    keep: Annotated[object, NoEffect("the chat template decides which earlier reasoning it keeps")] = None


class ContextManagement(RequestBody):
    edits: list[ContextEdit] | None = Field(None, description="Edits of the conversation.")


class CountTokensBody(RequestBody):
    """What determines a prompt: the fields that both endpoints share."""

    model: str = Field(description="The name of the served model.")
    messages: Annotated[list[AnthropicMessage], FailFast()] = Field(min_length=1, description="The conversation.")
    system: object = Field(None, description="The system prompt: a text, or an array of blocks of text.")
    tools: list[object] | None = Field(None, description="The tools that the model may call.")
    tool_choice: AnthropicToolChoice | None = Field(None, description="Whether it must call one.")
    thinking: Thinking | None = Field(None, description="Whether it thinks before it answers.")
    output_config: OutputConfig | None = Field(None, description="The form of the reply.")

    cache_control: CacheControl = None
    context_management: ContextManagement | None = Field(None, description="What Claude Code sends about reasoning.")
    speed: Annotated[Literal["standard"] | None, NoEffect("there is one speed")] = None
    mcp_servers: Annotated[object, SERVER_SIDE] = None
    output_format: OutputFormat = Field(None, description="The older place of output_config.format.")


@sampling_body("anthropic")
class MessagesBody(CountTokensBody, NamedBody, SamplesTokens):
    """The body of `/v1/messages`. The sampling parameters of this server are fields here too."""

    max_tokens: int = Field(
        ge=1, le=MAX_TOKENS, description="Maximum number of tokens; the output ends earlier where the context does."
    )
    stream: bool | None = Field(None, description="Send the reply as server-sent events during generation.")
    cache_salt: Salt = None

    metadata: Annotated[dict[str, object] | None, NoEffect("labels for abuse statistics; there are none")] = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, NoEffect("there is one tier")] = None
    inference_geo: Label = None
    user_profile_id: Label = None
    workspace_id: Label = None
    diagnostics: Annotated[object, Refused("reports about the cache; see /metrics")] = None
    n: Annotated[object, Refused("a response is one message")] = None
    container: Annotated[object, SERVER_SIDE] = None
    thread: Annotated[object, Refused("the server keeps no conversations; send it whole", code=THREADS)] = None
    fallbacks: Annotated[object, Refused("one model is served")] = None

    @property
    def namespace(self) -> str:
        """The namespace of the prefix cache (`RequestSpec.namespace`)."""
        return namespace_of(self.cache_salt, None)
