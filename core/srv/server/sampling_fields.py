"""Sampling parameters in request bodies, and their form for all protocols, `Sampling`.

    srv.types.SamplingOptions ─┬─► Sampling ──► fields of the bodies of all protocols
                               └─► SamplingParams of a RequestSpec

A parameter is declared in `SamplingOptions`, or in `Sampling` if only the API process applies it. The fields of the
bodies are made from the declaration, and the preprocessor copies every field of `SamplingOptions` into the
`SamplingParams` that the worker reads.

Must not know tokens, text or the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import Meta
from pydantic import Field, PlainValidator, create_model

from srv.server.fields import NoEffect, Refused, RequestBody, field_error, json_type, shorten
from srv.types import MAX_TOKENS, SamplingOptions

MAX_OUTPUTS = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_SEED = 2**63 - 1
MAX_RID_LENGTH = 256


class Sampling(SamplingOptions, frozen=True, kw_only=True):
    """The sampling parameters of a client, in one form for all protocols. None: not set.

    Adds those that the API process itself applies, or replaces before they reach the engine.
    """

    max_tokens: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_TOKENS,
                description="Maximum number of tokens per output.",
                extra={"native": "max_new_tokens"},
            ),
        ]
        | None
    ) = None
    seed: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_SEED,
                description="The same seed gives the same outputs.",
                extra={"native": "sampling_seed"},
            ),
        ]
        | None
    ) = None
    n: Annotated[int, Meta(ge=1, le=MAX_OUTPUTS, description="Outputs per prompt.")] = 1
    stop: Annotated[tuple[str, ...], Meta(description="Strings that end the output.")] = ()
    skip_special_tokens: Annotated[bool, Meta(description="Omit special tokens from the text (default).")] = True
    include_stop_str_in_output: Annotated[
        bool, Meta(description="Keep the stop string or token in the text.", extra={"native": "no_stop_trim"})
    ] = False


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
    if value != -1 and value < 1:
        raise field_error("invalid_value", "must be -1 (keep all tokens) or at least 1")
    return min(value, MAX_TOKENS)  # no vocabulary has more


_STRINGS_SCHEMA = str | list[str] | None
StopStrings = Annotated[tuple[str, ...], PlainValidator(_stop, json_schema_input_type=_STRINGS_SCHEMA)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids, json_schema_input_type=list[int] | None)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None),
]
TopK = Annotated[int, PlainValidator(_top_k, json_schema_input_type=int | None)]
# Parameters whose JSON form is not their type, with validators that check their bounds.
_JSON_FORMS: dict[str, Any] = {
    "logit_bias": LogitBias,
    "stop": StopStrings,
    "stop_token_ids": TokenIds,
    "top_k": TopK,
}
Unsupported = Annotated[object, Refused("this server does not support it")]
User = Annotated[str | None, NoEffect("a label for abuse statistics, which this server does not have")]


def _declaration(declared: object) -> tuple[type, Meta] | None:
    """Type and `Meta` of Annotated[T, Meta] and Annotated[T, Meta] | None."""
    for option in (declared, *get_args(declared)):
        if get_origin(option) is Annotated:
            kind, meta = get_args(option)
            return kind, meta
    return None


class SamplesTokens(RequestBody):
    """Base of request bodies that sample. `spelled`: the field of this body for each declared field of `Sampling`."""

    spelled: ClassVar[dict[str, str]] = {}

    def sampling(self) -> Sampling:
        """The declared fields that the client set."""
        values = {name: getattr(self, spelled) for name, spelled in self.spelled.items()}
        return Sampling(**{name: value for name, value in values.items() if value is not None})


Body = TypeVar("Body", bound=SamplesTokens)


def sampling_body(protocol: str) -> Callable[[type[Body]], type[Body]]:
    """Decorates a request body: adds the declared fields of `Sampling`, as `protocol` spells them.

    The names of the other protocols become hints for unknown fields.
    """

    def decorate(body: type[Body]) -> type[Body]:
        fields: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        renamed: dict[str, str] = {}
        for parameter in msgspec.structs.fields(Sampling):
            if (declaration := _declaration(parameter.type)) is None:
                continue
            (kind, meta), name = declaration, parameter.name
            names = meta.extra or {}
            spelled[name] = own = names.get(protocol, name)
            renamed |= {other: own for other in (name, *names.values()) if other != own}
            bounds: dict[str, Any] = {"gt": meta.gt, "ge": meta.ge, "lt": meta.lt, "le": meta.le}
            if name in _JSON_FORMS:  # these accept null
                fields[own] = (_JSON_FORMS[name], Field(parameter.default, description=meta.description))
            else:
                fields[own] = (kind | None, Field(None, description=meta.description, **bounds))
        shared = cast(type[Body], create_model("Shared", __base__=SamplesTokens, **fields))
        model = create_model(body.__name__, __base__=(body, shared), __module__=body.__module__, __doc__=body.__doc__)
        model.spelled, model.RENAMED = spelled, {**renamed, **body.RENAMED}
        return model

    return decorate


@sampling_body("openai")
class SamplingBody(SamplesTokens):
    """Fields that `/v1/completions` and `/v1/chat/completions` share, sampling first."""

    RENAMED = {  # noqa: RUF012 - a ClassVar by its declaration in the base
        "stop_strings": "stop",
        "stop_sequences": "stop",
        "repeat_penalty": "repetition_penalty",
        "num_predict": "max_tokens",
        "n_predict": "max_tokens",
    }

    model: str | None = Field(None, description="The name of the served model; optional.")
    rid: str | None = Field(
        None, min_length=1, max_length=MAX_RID_LENGTH, description="The request id, for example for /abort_request."
    )
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
