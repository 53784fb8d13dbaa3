"""The fields of the body of `/v1/responses`, and of the objects in it.

Sources: OpenAI's API reference, and the requests of Codex. Must not know how a request is served.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from srv.reply.output import MAX_CALL_ID, MAX_NAME
from srv.server.protocols.common.tool_fields import TOOL_NAME, Parsed
from srv.server.request.fields import NoEffect, Refused, RequestBody
from srv.server.request.grammar_fields import StructuredOutputs, TextFormat
from srv.server.request.sampling_fields import (
    MAX_TOP_LOGPROBS,
    NamedBody,
    Salt,
    SamplesTokens,
    User,
    namespace_of,
    sampling_body,
)

MAX_ID = 256  # of a response or an item
LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"


class TextOptions(RequestBody):
    format: TextFormat = Field(None, description="text, json_object, or json_schema with its name and schema.")
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, NoEffect("a hint of Codex, which only OpenAI's models know")
    ] = None


class ReasoningOptions(RequestBody):
    effort: str | None = Field(
        None, max_length=16, description="How long to think, for chat templates that read reasoning_effort."
    )
    summary: Annotated[str | None, NoEffect("reasoning is returned as it is, without a summary")] = None
    generate_summary: Annotated[str | None, NoEffect("the older name of summary")] = None
    context: Annotated[object, Refused("the chat template decides which earlier reasoning it keeps")] = None


class ResponseStreamOptions(RequestBody):
    include_obfuscation: Annotated[object, Refused("padding against traffic analysis")] = None


@sampling_body("responses")
class ResponsesBody(NamedBody, SamplesTokens):
    """The body of `/v1/responses`. The sampling parameters of this server are fields here too."""

    RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens"}  # noqa: RUF012 - as in its base

    model: str | None = Field(None, description="The name of the served model; optional.")
    input: object = Field(None, description="A text, or an array of items: messages, calls and their results.")
    instructions: str | None = Field(None, description="The system prompt; responses that follow do not inherit it.")
    previous_response_id: str | None = Field(
        None, max_length=MAX_ID, description="The stored response whose conversation goes on."
    )
    store: bool | None = Field(None, description="Keep the response, in memory and not for ever (default true).")
    stream: bool | None = Field(None, description="Send the response as server-sent events during generation.")
    stream_options: ResponseStreamOptions | None = Field(None, description="Only with stream.")
    tools: list[object] | None = Field(
        None, description="Functions and custom tools; those of OpenAI that Codex always sends are left out."
    )
    tool_choice: object = Field(None, description="auto, none, required, a tool, or allowed_tools.")
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls per response (default true).")
    text: TextOptions | None = Field(None, description="The form of the text.")
    structured_outputs: StructuredOutputs = Field(None, description="What the output must follow, in vLLM's form.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest turns of a conversation that does not fit into the context."
    )
    reasoning: ReasoningOptions | None = Field(None, description="How the model thinks.")
    include: list[str] | None = Field(
        None, description=f"{LOGPROBS}, and {ENCRYPTED_REASONING} (which is only encoded here, not encrypted)."
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"Top log-probabilities per token; needs {LOGPROBS}."
    )
    metadata: dict[str, str] | None = Field(None, description="Returned with the response.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one tier.")
    cache_salt: Salt = None

    user: User = None
    safety_identifier: Annotated[str | None, NoEffect("like `user`")] = None
    prompt_cache_key: Annotated[str | None, NoEffect("a routing hint; this server has only one cache")] = None
    max_tool_calls: Annotated[int | None, Field(ge=1), NoEffect("it limits tools that OpenAI runs; there are none")] = (
        None
    )
    client_metadata: Annotated[dict[str, object] | None, NoEffect("labels of Codex for OpenAI's logs")] = None

    n: Annotated[object, Refused("a response has one output")] = None
    background: Annotated[object, Refused("responses in the background")] = None
    conversation: Annotated[object, Refused("stored conversations; use previous_response_id")] = None
    prompt: Annotated[object, Refused("stored prompts; send input")] = None
    context_management: Annotated[object, Refused("compaction")] = None
    moderation: Annotated[object, Refused("moderation")] = None
    prompt_cache_retention: Annotated[object, Refused("the prefix cache evicts the least recently used pages")] = None
    prompt_cache_options: Annotated[object, Refused("the prefix cache has no options per request")] = None
    image: Annotated[object, Refused("images")] = None
    access_programs: Annotated[object, Refused("programs of OpenAI")] = None

    @property
    def namespace(self) -> str:
        """The namespace of the prefix cache (`RequestSpec.namespace`)."""
        return namespace_of(self.cache_salt, None)


Status = Annotated[str | None, NoEffect("earlier items are part of the prompt whatever their status")]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID, description="The id of the call.")]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME, description="The name of the tool.")]
NewName = Annotated[
    str, Field(min_length=1, max_length=MAX_NAME, pattern=TOOL_NAME, description="The name of the tool.")
]
Extra = Annotated[object, NoEffect("a label of OpenAI's own models")]


class MessageItem(RequestBody):
    type: Literal["message"] | None = Field(None, description="message; optional.")
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Who says it.")
    content: object = Field(description="A text, or an array of text parts.")
    id: str | None = Field(None, max_length=MAX_ID, description="The id of the item.")
    status: Status = None
    phase: Extra = None


class FunctionCallItem(RequestBody):
    type: Literal["function_call"] = Field(description="function_call")
    call_id: CallId
    name: Name
    arguments: str = Field(description="The arguments, as the model wrote them, also if they are no JSON.")
    parsed_arguments: Parsed = None
    id: str | None = Field(None, max_length=MAX_ID, description="The id of the item.")
    status: Status = None
    namespace: Annotated[object, Refused("namespaces of tools")] = None


class CustomCallItem(RequestBody):
    type: Literal["custom_tool_call"] = Field(description="custom_tool_call")
    call_id: CallId
    name: Name
    input: str = Field(description="The input, a text.")
    id: str | None = Field(None, max_length=MAX_ID, description="The id of the item.")
    status: Status = None
    namespace: Annotated[object, Refused("namespaces of tools")] = None


class OutputItem(RequestBody):
    type: Literal["function_call_output", "custom_tool_call_output"] = Field(description="Its type.")
    call_id: CallId
    output: object = Field(description="The result: a text, or an array of text parts.")
    id: str | None = Field(None, max_length=MAX_ID, description="The id of the item.")
    status: Status = None


class ReasoningItem(RequestBody):
    type: Literal["reasoning"] = Field(description="reasoning")
    content: object = Field(None, description="An array of parts of type reasoning_text.")
    encrypted_content: str | None = Field(None, description="The reasoning, as this server encoded it.")
    summary: Annotated[object, NoEffect("the reasoning itself is part of the prompt")] = None
    id: str | None = Field(None, max_length=MAX_ID, description="The id of the item.")
    status: Status = None


ITEMS: dict[str, type[RequestBody]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


class FunctionTool(RequestBody):
    type: Literal["function"] = Field(description="function")
    name: NewName
    description: str | None = Field(None, description="What the tool does.")
    parameters: dict[str, object] | None = Field(None, description="The JSON Schema of the arguments.")
    strict: bool | None = Field(None, description="The arguments must follow the schema.")
    defer_loading: Annotated[object, NoEffect("the prompt describes all tools")] = None


class CustomTool(RequestBody):
    type: Literal["custom"] = Field(description="custom")
    name: NewName
    description: str | None = Field(None, description="What the tool does.")
    format: dict[str, object] | None = Field(None, description="The form of the input; described to the model.")
    defer_loading: Annotated[object, NoEffect("the prompt describes all tools")] = None
