"""The fields of the bodies of the native endpoints; names and defaults are SGLang's.

Must not know how a request is served.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from srv.server.protocols.openai.fields import PromptInput
from srv.server.request.fields import Refused, RequestBody
from srv.server.request.grammar_fields import Ebnf, JsonSchema, Regex, StructuralTag
from srv.server.request.sampling_fields import (
    MAX_LISTED_IDS,
    MAX_RID_LENGTH,
    MAX_SALT_LENGTH,
    ProcessorName,
    ProcessorParams,
    SamplesTokens,
    Unsupported,
    sampling_body,
)

DEFAULT_NEW_TOKENS = 128


def _or_list(item: dict[str, Any]) -> Any:
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item}]})


_IDS = {"type": "array", "items": {"type": "integer"}}
PromptTokenIds = Annotated[
    object, WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": {"anyOf": [_IDS, {"type": "null"}]}}]})
]


@sampling_body("native")
class NativeSampling(SamplesTokens):
    """`sampling_params` of `/generate`."""

    RENAMED = {"max_completion_tokens": "max_new_tokens"}  # noqa: RUF012 - a ClassVar by its declaration in the base

    spaces_between_special_tokens: Annotated[object, Refused("the tokenizer determines the text")] = None
    json_schema: JsonSchema = Field(None, description="A JSON schema that the output follows.")
    regex: Regex = Field(None, description="A regular expression for the whole output.")
    ebnf: Ebnf = Field(None, description="A grammar in EBNF or Lark that the output follows.")
    structural_tag: StructuralTag = Field(None, description="Free text with constrained parts.")
    custom_params: ProcessorParams = None
    stream_interval: Annotated[object, Refused("every delta is sent")] = None


class GenerateBody(RequestBody):
    """`/generate`. A field that accepts a list instead of a single value takes one entry per prompt."""

    RENAMED = {"prompt": "text", "prompt_ids": "input_ids", "logprobs": "return_logprob"}  # noqa: RUF012

    text: Annotated[object, _or_list({"type": "string"})] = Field(None, description="A prompt, or an array of prompts.")
    input_ids: PromptInput = Field(None, description="Token ids of a prompt, or an array of such arrays.")
    sampling_params: Annotated[object, _or_list({"type": "object"})] = Field(
        None, description=f"Sampling parameters; max_new_tokens is {DEFAULT_NEW_TOKENS} by default."
    )
    rid: Annotated[object, _or_list({"type": "string", "maxLength": MAX_RID_LENGTH})] = Field(
        None,
        description="The request id, for example for /abort_request; that of a batch stands for all of its prompts.",
    )
    return_logprob: Annotated[object, _or_list({"type": "boolean"})] = Field(
        None, description="Return log-probabilities."
    )
    logprob_start_len: Annotated[object, _or_list({"type": "integer"})] = Field(
        None, description="First prompt position with log-probabilities; -1 (default): output only."
    )
    top_logprobs_num: Annotated[object, _or_list({"type": "integer"})] = Field(
        None, description="Return this many top log-probabilities per token; needs return_logprob."
    )
    token_ids_logprob: PromptTokenIds = Field(
        None,
        description=f"Return the log-probabilities of these token ids, too (at most {MAX_LISTED_IDS}), at each"
        " position; needs return_logprob. An array of arrays has the ids of each prompt.",
    )
    return_text_in_logprobs: bool | None = Field(None, description="Return the text of each token, too.")
    return_hidden_states: Annotated[object, _or_list({"type": "boolean"})] = Field(
        None, description="Return the hidden states; the server must run with --enable-return-hidden-states."
    )
    stream: bool | None = Field(None, description="Send the output as server-sent events during generation.")
    cache_salt: Annotated[object, _or_list({"type": "string", "maxLength": MAX_SALT_LENGTH})] = Field(
        None, description="Share cached prompts only with requests of the same value."
    )
    extra_key: Annotated[object, _or_list({"type": "string", "maxLength": MAX_SALT_LENGTH})] = Field(
        None, description="Like cache_salt."
    )

    input_embeds: Annotated[object, Refused("prompts as embeddings")] = None
    image_data: Annotated[object, Refused("images")] = None
    audio_data: Annotated[object, Refused("audio")] = None
    video_data: Annotated[object, Refused("video")] = None
    modalities: Annotated[object, Refused("input other than text")] = None
    lora_path: Annotated[object, Refused("adapters")] = None
    session_params: Annotated[object, Refused("sessions; the prefix cache reuses shared prefixes automatically")] = None
    custom_logit_processor: ProcessorName = None
    log_metrics: Annotated[object, Refused("metrics always count every request")] = None
    background: Annotated[object, Refused("background requests")] = None
    conversation_id: Annotated[object, Refused("sessions")] = None
    priority: Annotated[object, Refused("all requests have the same priority")] = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    data_parallel_rank: Unsupported = None


class AbortBody(RequestBody):
    rid: Annotated[object, _or_list({"type": "string"})] = Field(
        None, description="The id of a running request, or an array of ids."
    )
    abort_all: bool | None = Field(None, description="Abort every running request.")
