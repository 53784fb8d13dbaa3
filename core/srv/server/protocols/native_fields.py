"""The fields of the bodies of the native endpoints; names and defaults are SGLang's.

Must not know how a request is served.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from srv.server.fields import Refused, RequestBody
from srv.server.protocols.openai_fields import ChatMessage, PromptInput
from srv.server.sampling_fields import (
    MAX_OUTPUTS,
    MAX_RID_LENGTH,
    MAX_SEED,
    MAX_TOKENS,
    LogitBias,
    Sampling,
    StopStrings,
    TokenIds,
    TopK,
    Unsupported,
)

DEFAULT_NEW_TOKENS = 128


def _or_list(item: dict[str, Any]) -> Any:
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item}]})


class NativeSampling(RequestBody):
    """`sampling_params` of `/generate`."""

    RENAMED = {  # noqa: RUF012 - a ClassVar by its declaration in the base
        "max_tokens": "max_new_tokens",
        "max_completion_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
        "include_stop_str_in_output": "no_stop_trim",
    }

    max_new_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description=f"Maximum number of tokens per output (default {DEFAULT_NEW_TOKENS})."
    )
    min_new_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Minimum number of tokens before an end token; stop strings still apply."
    )
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy sampling.")
    top_p: float | None = Field(
        None, gt=0, le=1, description="Keep the most likely tokens up to this total probability."
    )
    top_k: TopK = Field(-1, description="Keep this many of the most likely tokens; -1 keeps all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Drop tokens below this fraction of the highest probability."
    )
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Above 1 discourages repetition.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Subtracted per occurrence of a token.")
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted once for each token that occurred."
    )
    logit_bias: LogitBias = Field((), description="Maps token ids (as strings) to biases from -100 to 100.")
    sampling_seed: int | None = Field(None, ge=0, le=MAX_SEED, description="The same seed gives the same outputs.")
    n: int | None = Field(None, ge=1, le=MAX_OUTPUTS, description="Outputs per prompt.")
    stop: StopStrings = Field((), description="Strings that end the output.")
    stop_token_ids: TokenIds = Field((), description="Token ids that end the output.")
    ignore_eos: bool | None = Field(None, description="Continue after the model's end token.")
    skip_special_tokens: bool | None = Field(None, description="Omit special tokens from the text (default).")
    no_stop_trim: bool | None = Field(None, description="Keep the stop string or token in the text.")

    spaces_between_special_tokens: Annotated[object, Refused("the tokenizer determines the text", (None, True))] = None
    stop_regex: Annotated[object, Refused("use stop", (None, []))] = None
    json_schema: Annotated[object, Refused("constrained output")] = None
    regex: Annotated[object, Refused("constrained output")] = None
    ebnf: Annotated[object, Refused("constrained output")] = None
    structural_tag: Annotated[object, Refused("constrained output")] = None
    custom_params: Unsupported = None
    stream_interval: Annotated[object, Refused("every delta is sent", (None, 1))] = None

    def sampling(self, *, logprobs: int | None, prompt_logprobs: int | None, prompt_logprobs_start: int) -> Sampling:
        """Convert to `Sampling`."""
        same = (
            "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "n",
            "ignore_eos", "skip_special_tokens",
        )  # fmt: skip
        given = {name: value for name in same if (value := getattr(self, name)) is not None}
        return Sampling(
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens or 0,
            top_k=self.top_k,
            logit_bias=self.logit_bias,
            seed=self.sampling_seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop=bool(self.no_stop_trim),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_start=prompt_logprobs_start,
            **given,
        )


class GenerateBody(RequestBody):
    """`/generate`. A field that accepts a list instead of a single value takes one entry per prompt."""

    RENAMED = {"prompt": "text", "prompt_ids": "input_ids", "logprobs": "return_logprob"}  # noqa: RUF012

    text: Annotated[object, _or_list({"type": "string"})] = Field(None, description="A prompt, or an array of prompts.")
    input_ids: PromptInput = Field(None, description="Token ids of a prompt, or an array of such arrays.")
    sampling_params: Annotated[object, _or_list({"type": "object"})] = Field(None, description="Sampling parameters.")
    rid: Annotated[object, _or_list({"type": "string", "maxLength": MAX_RID_LENGTH})] = Field(
        None, description="The request id, for example for /abort_request."
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
    return_text_in_logprobs: bool | None = Field(None, description="Return the text of each token, too.")
    return_hidden_states: Annotated[object, _or_list({"type": "boolean"})] = Field(
        None, description="Return the hidden states; the server must run with --enable-return-hidden-states."
    )
    stream: bool | None = Field(None, description="Send the output as server-sent events during generation.")

    input_embeds: Annotated[object, Refused("prompts as embeddings")] = None
    image_data: Annotated[object, Refused("images", (None, []))] = None
    audio_data: Annotated[object, Refused("audio", (None, []))] = None
    video_data: Annotated[object, Refused("video", (None, []))] = None
    modalities: Annotated[object, Refused("input other than text", (None, []))] = None
    token_ids_logprob: Annotated[object, Refused("log-probabilities of given ids; use top_logprobs_num")] = None
    lora_path: Annotated[object, Refused("adapters")] = None
    session_params: Annotated[object, Refused("sessions; the prefix cache reuses shared prefixes automatically")] = None
    custom_logit_processor: Unsupported = None
    log_metrics: Annotated[object, Refused("metrics always count every request", (None, True))] = None
    background: Annotated[object, Refused("background requests", (None, False))] = None
    conversation_id: Annotated[object, Refused("sessions")] = None
    priority: Annotated[object, Refused("all requests have the same priority", (None, 0))] = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    data_parallel_rank: Unsupported = None


class AbortBody(RequestBody):
    rid: Annotated[object, _or_list({"type": "string"})] = Field(
        None, description="The id of a running request, or an array of ids."
    )
    abort_all: bool | None = Field(None, description="Abort every running request.")


class TokenizeBody(RequestBody):
    RENAMED = {"text": "prompt"}  # noqa: RUF012 - a ClassVar by its declaration in the base

    model: str | None = Field(None, description="The name of the served model; optional.")
    prompt: Annotated[object, _or_list({"type": "string"})] = Field(None, description="A text, or an array of texts.")
    messages: list[ChatMessage] | None = Field(None, min_length=1, description="A conversation, instead of prompt.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens (default true for prompt, false for messages)."
    )
    add_generation_prompt: bool | None = Field(None, description="For messages; default true.")
    chat_template_kwargs: dict[str, object] | None = Field(None, description="Extra variables for the chat template.")
    return_token_strs: bool | None = Field(None, description="Return the text of each token, too.")


class DetokenizeBody(RequestBody):
    model: str | None = Field(None, description="The name of the served model; optional.")
    tokens: PromptInput = Field(description="Token ids, or an array of arrays of token ids.")
    skip_special_tokens: bool | None = Field(None, description="Omit special tokens from the text (default).")
