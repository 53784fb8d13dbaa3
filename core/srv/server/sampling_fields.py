"""Sampling parameters: the fields that both OpenAI endpoints share, and their form for all protocols, `Sampling`.

Owns the ranges of sampling fields. Must not know tokens, text or the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PlainValidator

from srv.server.fields import NoEffect, Refused, RequestBody, field_error, json_type, shorten

MAX_OUTPUTS = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_TOKENS = 2**31 - 1  # the limits of the context and the KV pool are checked later
MAX_SEED = 2**63 - 1
MAX_RID_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters of a client, in one form for all protocols. None: not set."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    hidden_states: bool = False


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise field_error("invalid_type", f"must be a string or an array of strings, not {json_type(value)}")
    for string in strings:
        if not isinstance(string, str):
            raise field_error("invalid_type", f"must contain only strings, not {json_type(string)}")
        if not string:
            raise field_error("invalid_value", "must not contain an empty string, which would stop every output")
        if len(string) > MAX_STOP_LENGTH:
            raise field_error("invalid_value", f"must contain strings of at most {MAX_STOP_LENGTH} characters")
    return tuple(strings)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise field_error("invalid_type", "must be an array of token ids (integers)")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise field_error("invalid_value", f"must contain at most {MAX_STOP_TOKEN_IDS} token ids")
    return tuple(dict.fromkeys(value))


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise field_error("invalid_type", f"must be an object that maps token ids to biases, not {json_type(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise field_error("invalid_value", f"must have at most {MAX_LOGIT_BIAS} entries")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12):
            raise field_error("invalid_value", f'must have token ids as keys, not "{shorten(key)}"')
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise field_error("invalid_value", f"must have biases from -100 to 100, not {shorten(bias)} for {key}")
        pairs[int(key)] = float(bias)
    return tuple(sorted(pairs.items()))


def _top_k(value: object) -> int:
    if value is None:
        return -1
    if type(value) is not int:
        raise field_error("int_type", "must be an integer")
    if value != -1 and not 1 <= value <= MAX_TOKENS:
        raise field_error("invalid_value", "must be -1 (keep all tokens) or at least 1")
    return value


_STRINGS_SCHEMA = str | list[str] | None
StopStrings = Annotated[tuple[str, ...], PlainValidator(_stop, json_schema_input_type=_STRINGS_SCHEMA)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids, json_schema_input_type=list[int] | None)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None),
]
TopK = Annotated[int, PlainValidator(_top_k, json_schema_input_type=int | None)]
Unsupported = Annotated[object, Refused("this server does not support it")]
User = Annotated[str | None, NoEffect("a label for abuse statistics, which this server does not have")]


class SamplingBody(RequestBody):
    """Fields that `/v1/completions` and `/v1/chat/completions` share, sampling first."""

    RENAMED = {  # noqa: RUF012 - a ClassVar by its declaration in the base
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "stop_strings": "stop",
        "stop_sequences": "stop",
        "no_stop_trim": "include_stop_str_in_output",
        "repeat_penalty": "repetition_penalty",
        "num_predict": "max_tokens",
        "n_predict": "max_tokens",
    }

    model: str | None = Field(None, description="The name of the served model; optional.")
    rid: str | None = Field(
        None, min_length=1, max_length=MAX_RID_LENGTH, description="The request id, for example for /abort_request."
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="Maximum number of tokens per output.")
    min_tokens: int | None = Field(
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
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Above 1 discourages tokens that occurred; 1 has no effect."
    )
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Subtracted per occurrence of a token.")
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted once for each token that occurred."
    )
    logit_bias: LogitBias = Field((), description="Maps token ids (as strings) to biases from -100 to 100.")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="The same seed gives the same outputs.")
    n: int | None = Field(None, ge=1, le=MAX_OUTPUTS, description="Outputs per prompt.")
    stop: StopStrings = Field((), description="Strings that end the output.")
    stop_token_ids: TokenIds = Field((), description="Token ids that end the output.")
    ignore_eos: bool | None = Field(None, description="Continue after the model's end token.")
    skip_special_tokens: bool | None = Field(None, description="Omit special tokens from the text (default).")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop string or token in the text.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Return log-probabilities of the prompt's tokens, and this many top ones.",
    )
    stream: bool | None = Field(None, description="Send the output as server-sent events during generation.")

    user: User = None
    safety_identifier: Annotated[str | None, NoEffect("like `user`")] = None
    prompt_cache_key: Annotated[str | None, NoEffect("a routing hint; this server has only one cache")] = None

    store: Annotated[object, Refused("outputs are not stored", (None, False))] = None
    metadata: Annotated[object, Refused("it labels stored outputs, and outputs are not stored")] = None
    best_of: Annotated[object, Refused("ranking of outputs; use n and rank them in the client", (None, 1))] = None
    use_beam_search: Annotated[object, Refused("beam search", (None, False))] = None
    length_penalty: Annotated[object, Refused("it belongs to beam search", (None, 1, 1.0))] = None
    response_format: Annotated[object, Refused("constrained output", (None, {"type": "text"}))] = None
    guided_json: Annotated[object, Refused("constrained output")] = None
    guided_regex: Annotated[object, Refused("constrained output")] = None
    guided_choice: Annotated[object, Refused("constrained output")] = None
    guided_grammar: Annotated[object, Refused("constrained output")] = None
    structured_outputs: Annotated[object, Refused("constrained output")] = None
    json_schema: Annotated[object, Refused("constrained output")] = None
    regex: Annotated[object, Refused("constrained output")] = None
    ebnf: Annotated[object, Refused("constrained output")] = None
    bad_words: Annotated[object, Refused("use logit_bias with -100", (None, []))] = None
    allowed_token_ids: Annotated[object, Refused("use logit_bias")] = None
    custom_logit_processor: Unsupported = None
    logits_processors: Unsupported = None
    lora_path: Annotated[object, Refused("adapters")] = None
    truncate_prompt_tokens: Annotated[object, Refused("prompts are not truncated")] = None
    priority: Annotated[object, Refused("all requests have the same priority", (None, 0))] = None
    service_tier: Annotated[object, Refused("there is one tier", (None, "auto", "default"))] = None
    return_token_ids: Annotated[object, Refused("use /generate, which returns them", (None, False))] = None
    return_hidden_states: Annotated[object, Refused("use /generate, which returns them", (None, False))] = None
    spaces_between_special_tokens: Annotated[object, Refused("the tokenizer determines the text", (None, True))] = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    data_parallel_rank: Unsupported = None

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> Sampling:
        """Convert to `Sampling`; the arguments are the fields that differ between endpoints."""
        given = {
            name: value
            for name in (
                "min_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
                "presence_penalty", "n", "ignore_eos", "skip_special_tokens",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        return Sampling(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            top_k=self.top_k,
            logit_bias=self.logit_bias,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop=bool(self.include_stop_str_in_output),
            **given,
        )
