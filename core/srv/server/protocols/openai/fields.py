"""The fields of the bodies of `/v1/completions`, `/v1/chat/completions`, `/v1/embeddings` and `/tokenize`.

Source: OpenAI's API reference; the extensions are fields of vLLM and SGLang. Must not know how a request is served.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from srv.limits import MAX_TOKENS
from srv.reply.output import MAX_CALL_ID
from srv.server.protocols.common.tool_fields import CallBody, Parsed, ToolBody, ToolChoice
from srv.server.request.fields import Refused, RequestBody, field_error, json_type, shorten
from srv.server.request.neutral import is_neutral
from srv.server.request.sampling_fields import (
    MAX_TOP_LOGPROBS,
    NamedBody,
    PooledTruncation,
    Salt,
    SamplingBody,
    Unsupported,
    User,
)

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


_TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(None, description="Send the token counts in a last chunk.")
    continuous_usage_stats: bool | None = Field(None, description="Send the token counts so far in every chunk.")
    include_obfuscation: Annotated[object, Refused("padding against traffic analysis")] = None


class CompletionBody(SamplingBody):
    RENAMED = {**SamplingBody.RENAMED, "max_completion_tokens": "max_tokens"}  # noqa: RUF012 - as in its base

    prompt: PromptInput = Field(description="A text, or an array of texts, of token ids, or of arrays of token ids.")
    echo: bool | None = Field(None, description="Return the prompt before the output.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Return log-probabilities of the tokens, and this many top ones."
    )
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens (default true).")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    suffix: str | None = Field(
        None, description="What follows the output, for models with tokens for it; prompt must be text."
    )


def _content(value: object) -> str | None:
    """Text content, or the concatenated texts of an array of parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise field_error("invalid_type", f"must be a string or an array of parts, not {json_type(value)}")
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise field_error("invalid_value", 'must contain parts like {"type": "text", "text": "..."}')
        if part["type"] != "text":
            kind = shorten(part["type"])
            sentence = '[{index}].type = "{kind}" is not implemented; send text'
            raise PydanticCustomError("part_not_implemented", sentence, {"index": index, "kind": kind})
        other_fields = [
            name for name, content in part.items() if name not in ("type", "text") and not is_neutral(name, content)
        ]
        if other_fields or not isinstance(part.get("text"), str):
            raise field_error("invalid_value", 'has a part of type text without "text", or with other fields')
        texts.append(part["text"])
    return "".join(texts)


MAX_TEMPLATE_LENGTH = 1_000_000
RequestTemplate = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=MAX_TEMPLATE_LENGTH,
        description="A Jinja template instead of the model's; needs --trust-request-chat-template.",
    ),
]
OLD_TOOLS = "the former fields of tool calling; use tools and tool_choice"
Content = Annotated[
    str | None,
    PlainValidator(_content, json_schema_input_type=str | list[dict[str, str]] | None),
]


class ChatMessage(RequestBody):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is the newer name of system; tool: the result of a call."
    )
    content: Content = Field(None, description="The text, or an array of text parts.")
    name: str | None = Field(None, max_length=256, description="Passed to the chat template.")

    tool_calls: list[CallBody] | None = Field(None, description="The calls of an assistant.")
    tool_call_id: str | None = Field(
        None, max_length=MAX_CALL_ID, description="The call that a message of role tool answers."
    )
    reasoning_content: str | None = Field(None, description="The reasoning of an assistant, for the chat template.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    parsed: Parsed = None

    function_call: Annotated[object, Refused(OLD_TOOLS)] = None
    refusal: Annotated[object, Refused("refusals as content")] = None
    audio: Annotated[object, Refused("audio")] = None
    annotations: Annotated[object, Refused("annotations")] = None


class ChatBody(SamplingBody):
    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1, description="The conversation so far.")
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Return log-probabilities of the output tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Return this many top log-probabilities per token; needs logprobs."
    )
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt with the start of an assistant message (default true)."
    )
    continue_final_message: bool | None = Field(
        None, description="The last message is the assistant's, and the output continues it."
    )
    chat_template: RequestTemplate = None
    chat_template_kwargs: dict[str, object] | None = Field(None, description="Extra variables for the chat template.")

    tools: list[ToolBody] | None = Field(None, description="The functions that it may call.")
    tool_choice: ToolChoice = Field(
        None,
        description="auto (default): the model decides; none; required; or an object that names a function, or with"
        " allowed_tools some of them.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in one message (default true).")
    separate_reasoning: bool | None = Field(
        None, description="Separate the reasoning from the answer (default true), if the model's format is known."
    )
    stream_reasoning: bool | None = Field(
        None, description="Stream the reasoning in pieces (default true); false: in one piece."
    )

    thinking_token_budget: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="After this many tokens, the reasoning ends. No limit by default."
    )
    reasoning_effort: str | None = Field(
        None, max_length=16, description="How long to think, for chat templates that read reasoning_effort."
    )

    functions: Annotated[object, Refused(OLD_TOOLS)] = None
    function_call: Annotated[object, Refused(OLD_TOOLS)] = None
    modalities: Annotated[object, Refused("output other than text")] = None
    audio: Annotated[object, Refused("audio")] = None
    prediction: Annotated[object, Refused("predicted output")] = None
    verbosity: Annotated[
        object, Refused("models are not trained for it; ask for short or long answers in a message")
    ] = None
    web_search_options: Annotated[object, Refused("web search")] = None
    prompt_cache_retention: Annotated[object, Refused("the prefix cache evicts the least recently used pages")] = None
    prompt_cache_options: Annotated[object, Refused("the prefix cache has no options per request")] = None
    moderation: Annotated[object, Refused("moderation")] = None
    documents: Annotated[object, Refused("documents for the template; use chat_template_kwargs")] = None
    mm_processor_kwargs: Annotated[object, Refused("images and audio")] = None
    echo: Annotated[object, Refused("it belongs to /v1/completions")] = None

    def field_of(self, name: str) -> str:
        """The field of this request with the field `name` of `Sampling`."""
        newer = name == "max_tokens" and self.max_completion_tokens is not None
        return "max_completion_tokens" if newer else self.spelled.get(name, name)


class EmbeddingBody(NamedBody):
    RENAMED = {  # noqa: RUF012 - a ClassVar by its declaration in the base
        "inputs": "input",
        "prompt": "input",
        "text": "input",
        "input_ids": "input",
        "use_activation": "normalize",
    }

    input: PromptInput = Field(
        None, description="A text, or an array of texts, of token ids, or of arrays of token ids."
    )
    messages: list[ChatMessage] | None = Field(
        None, min_length=1, description="A conversation, instead of input; the chat template makes it a text."
    )
    add_generation_prompt: bool | None = Field(
        None, description="For messages; end the text with the start of an assistant message (default false)."
    )
    continue_final_message: bool | None = Field(None, description="For messages; the last one stays open.")
    chat_template: RequestTemplate = None
    chat_template_kwargs: dict[str, object] | None = Field(None, description="Extra variables for the chat template.")
    model: str | None = Field(None, description="The name of the served model; optional.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float (default): an array of numbers; base64: the bytes of little-endian float32 numbers."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Keep this many leading elements, for models trained for it (default all)."
    )
    normalize: bool | None = Field(
        None, description="Scale each embedding to length 1 (default: as the model's files say, else true)."
    )
    prompt_name: str | None = Field(
        None, max_length=256, description="The prompt of the model's files that precedes the inputs, such as query."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens (default true for input, false for messages)."
    )
    truncate_prompt_tokens: PooledTruncation = None
    cache_salt: Salt = None
    extra_key: Salt = None

    user: User = None

    mm_processor_kwargs: Annotated[object, Refused("images and audio")] = None
    media_io_kwargs: Annotated[object, Refused("images and audio")] = None
    embed_dtype: Annotated[object, Refused("embeddings are float32")] = None
    endianness: Annotated[object, Refused("embeddings are little-endian")] = None
    embed_overrides: Annotated[object, Refused("prompts as embeddings")] = None
    embed_override_token_id: Annotated[object, Refused("prompts as embeddings")] = None
    return_pooled_hidden_states: Annotated[
        object, Refused("an embedding is the pooled hidden state; use normalize = false")
    ] = None
    truncation_side: Annotated[object, Refused("prompts lose tokens at their start")] = None
    priority: Annotated[object, Refused("all requests have the same priority")] = None
    lora_path: Annotated[object, Refused("adapters")] = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    data_parallel_rank: Unsupported = None


class TokenizeBody(RequestBody):
    RENAMED = {"text": "prompt"}  # noqa: RUF012 - a ClassVar by its declaration in the base

    model: str | None = Field(None, description="The name of the served model; optional.")
    prompt: Annotated[object, WithJsonSchema(_TEXT_OR_TEXTS)] = Field(None, description="A text, or an array of texts.")
    messages: list[ChatMessage] | None = Field(None, min_length=1, description="A conversation, instead of prompt.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens (default true for prompt, false for messages)."
    )
    add_generation_prompt: bool | None = Field(None, description="For messages; default true.")
    continue_final_message: bool | None = Field(None, description="For messages; the last one is continued.")
    tools: list[ToolBody] | None = Field(None, description="For messages; the functions that the prompt describes.")
    chat_template: RequestTemplate = None
    chat_template_kwargs: dict[str, object] | None = Field(None, description="Extra variables for the chat template.")
    return_token_strs: bool | None = Field(None, description="Return the text of each token, too.")


class DetokenizeBody(RequestBody):
    model: str | None = Field(None, description="The name of the served model; optional.")
    tokens: PromptInput = Field(description="Token ids, or an array of arrays of token ids.")
    skip_special_tokens: bool | None = Field(None, description="Omit special tokens from the text (default).")
