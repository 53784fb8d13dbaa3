"""The bodies of `/v1/completions` and `/v1/chat/completions`, field by field.

Facts: OpenAI's API reference for the fields without a remark; the extensions are those that vLLM and SGLang
also take. Must not know how a request is served.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from srv.server.fields import Refused, RequestBody, field_error, json_type, shorten
from srv.server.sampling_fields import MAX_TOKENS, MAX_TOP_LOGPROBS, SamplingBody

PromptInput = Annotated[
    object,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(None, description="Send a last chunk with the token counts.")
    continuous_usage_stats: Annotated[object, Refused("usage comes once, at the end", (None, False))] = None
    include_obfuscation: Annotated[object, Refused("padding against traffic analysis", (None, False))] = None


class CompletionBody(SamplingBody):
    prompt: PromptInput = Field(description="A text, an array of texts, of token ids, or of arrays of token ids.")
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Log-probabilities of the tokens, and of this many others."
    )
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own (default true).")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")

    suffix: Annotated[object, Refused("filling in the middle", (None, ""))] = None


def _content(value: object) -> str | None:
    """Text content, or the texts of an array of parts, joined as they are."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise field_error("invalid_type", f"must be a string or an array of parts, not {json_type(value)}")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise field_error("invalid_value", 'must hold parts like {"type": "text", "text": "..."}')
        if part["type"] != "text":
            kind = shorten(part["type"])
            raise PydanticCustomError("not_implemented", "content of type {kind}", {"kind": kind})
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise field_error("invalid_value", 'has a part of type text without "text", or with other fields')
        texts.append(part["text"])
    return "".join(texts)


def _function_field(feature: str) -> Refused:
    return Refused(feature, (None, []))


TOOLS = "tool calling"
Content = Annotated[
    str | None,
    PlainValidator(_content, json_schema_input_type=str | list[dict[str, str]] | None),
]


class ChatMessage(RequestBody):
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is the newer name of system."
    )
    content: Content = Field(None, description="The text, or an array of text parts.")
    name: str | None = Field(None, max_length=256, description="Given to the chat template.")

    tool_calls: Annotated[object, _function_field(TOOLS)] = None
    tool_call_id: Annotated[object, _function_field(TOOLS)] = None
    function_call: Annotated[object, _function_field(TOOLS)] = None
    refusal: Annotated[object, Refused("refusals as content")] = None
    audio: Annotated[object, Refused("audio")] = None
    reasoning_content: Annotated[object, Refused("reasoning as a field of its own")] = None
    annotations: Annotated[object, Refused("annotations", (None, []))] = None


class ChatBody(SamplingBody):
    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1, description="The conversation so far.")
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the output's tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="And of this many others; needs logprobs."
    )
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    add_generation_prompt: bool | None = Field(None, description="Let the template open the answer (default true).")
    chat_template_kwargs: dict[str, object] | None = Field(None, description="More variables for the chat template.")

    tools: Annotated[object, _function_field(TOOLS)] = None
    tool_choice: Annotated[object, Refused(TOOLS, (None, "none"))] = None
    parallel_tool_calls: Annotated[object, Refused(TOOLS)] = None
    functions: Annotated[object, _function_field(TOOLS)] = None
    function_call: Annotated[object, Refused(TOOLS, (None, "none"))] = None
    modalities: Annotated[object, Refused("output other than text", (None, ["text"]))] = None
    audio: Annotated[object, Refused("audio")] = None
    prediction: Annotated[object, Refused("predicted output")] = None
    reasoning_effort: Annotated[object, Refused("control of reasoning")] = None
    separate_reasoning: Annotated[object, Refused("reasoning as a field of its own", (None, False))] = None
    stream_reasoning: Annotated[object, Refused("reasoning as a field of its own")] = None
    verbosity: Annotated[object, Refused("control of verbosity")] = None
    web_search_options: Annotated[object, Refused("web search")] = None
    prompt_cache_retention: Annotated[object, Refused("the cache forgets the least recently used first")] = None
    prompt_cache_options: Annotated[object, Refused("the cache decides by itself")] = None
    moderation: Annotated[object, Refused("moderation of inputs and outputs")] = None
    chat_template: Annotated[object, Refused("the template is chosen when the server starts")] = None
    continue_final_message: Annotated[object, Refused("continuing an answer", (None, False))] = None
    documents: Annotated[object, Refused("documents for the template; use chat_template_kwargs")] = None
    mm_processor_kwargs: Annotated[object, Refused("images and audio")] = None
    echo: Annotated[object, Refused("it belongs to /v1/completions", (None, False))] = None
