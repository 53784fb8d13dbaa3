"""Sampling parameters in request bodies, and their form for all protocols, `Sampling`.

    srv.types.SamplingOptions ─┬─► Sampling ──► fields of the bodies of all protocols
                               └─► SamplingParams of a RequestSpec

A parameter is declared in `SamplingOptions`, or in `Sampling` if only the API process applies it. The fields of the
bodies are made from the declaration, and the preprocessor copies every field of `SamplingOptions` into the
`SamplingParams` that the worker reads.

Must not know tokens, text or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import Meta
from pydantic import Field, PlainValidator, create_model

from srv.errors import RequestError
from srv.grammar.source import GrammarSource
from srv.limits import MAX_TOKENS
from srv.server.request import grammar_fields
from srv.server.request.fields import NoEffect, Refused, RequestBody, field_error, json_type, shorten
from srv.types import SamplingOptions

MAX_OUTPUTS = 128
MAX_TOP_LOGPROBS = 20
MAX_LISTED_IDS = 128  # whose log-probabilities are returned at each position
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 2**17
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 128, 128
MAX_LOGIT_BIAS = 4096
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_RID_LENGTH = 256
MAX_SALT_LENGTH = 256


class Sampling(SamplingOptions, frozen=True, kw_only=True):
    """The sampling parameters of a client, in one form for all protocols. None: not set.

    Adds those that the API process itself applies, or replaces before they reach the engine. `given`: the names that
    the client set, so that the server's defaults apply to the others; None: no defaults apply.
    """

    given: tuple[str, ...] | None = None

    max_tokens: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_TOKENS,
                description="Maximum number of tokens per output.",
                extra={"native": "max_new_tokens", "responses": "max_output_tokens"},
            ),
        ]
        | None
    ) = None
    seed: (
        Annotated[
            int,
            Meta(
                ge=MIN_SEED,
                le=MAX_SEED,
                description="The same seed gives the same outputs; -1 draws one.",
                extra={"native": "sampling_seed"},
            ),
        ]
        | None
    ) = None
    n: Annotated[int, Meta(ge=1, le=MAX_OUTPUTS, description="Outputs per prompt.")] = 1
    stop: Annotated[
        tuple[str, ...], Meta(description="Strings that end the output.", extra={"anthropic": "stop_sequences"})
    ] = ()
    stop_regex: Annotated[
        tuple[str, ...], Meta(description="Regular expressions; the output ends where one of them matches.")
    ] = ()
    bad_words: Annotated[tuple[str, ...], Meta(description="Words that no output contains.")] = ()
    skip_special_tokens: Annotated[bool, Meta(description="Omit special tokens from the text (default).")] = True
    include_stop_str_in_output: Annotated[
        bool, Meta(description="Keep the stop string or token in the text.", extra={"native": "no_stop_trim"})
    ] = False
    grammar: GrammarSource | None = None  # it is requested differently in each protocol
    grammar_backend: str = ""  # what the request expects to compile it; "": any


def with_defaults(sampling: Sampling, defaults: Mapping[str, Any]) -> Sampling:
    """The parameters with the defaults of those that the client did not set."""
    if sampling.given is None or not defaults:
        return sampling
    missing = {name: value for name, value in defaults.items() if name not in sampling.given}
    if sampling.max_tokens is not None:  # set by a field of another name
        missing.pop("max_tokens", None)
    return msgspec.structs.replace(sampling, **missing)


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


def _token_ids(value: object, limit: int = MAX_STOP_TOKEN_IDS) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise field_error("invalid_type", "must be an array of token ids (integers)")
    if len(value) > limit:
        raise field_error("invalid_value", f"must contain at most {limit} token ids")
    return tuple(dict.fromkeys(value))


def _bad_words(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or any(not isinstance(word, str) for word in value):
        raise field_error("invalid_type", "must be an array of strings")
    if len(value) > MAX_BAD_WORDS:
        raise field_error("invalid_value", f"must contain at most {MAX_BAD_WORDS} words")
    if any(not 0 < len(word) <= MAX_BAD_WORD_LENGTH or word.isspace() for word in value):
        raise field_error("invalid_value", f"must contain words of 1 to {MAX_BAD_WORD_LENGTH} characters")
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
    if value < -1:
        raise field_error("invalid_value", "must be -1 or 0 (keep all tokens), or at least 1")
    return min(value, MAX_TOKENS) or -1  # no vocabulary has more


_STRINGS_SCHEMA = str | list[str] | None
StopStrings = Annotated[tuple[str, ...], PlainValidator(_stop, json_schema_input_type=_STRINGS_SCHEMA)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids, json_schema_input_type=list[int] | None)]
AllowedTokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(partial(_token_ids, limit=MAX_ALLOWED_TOKEN_IDS), json_schema_input_type=list[int] | None),
]
ListedTokenIds = Annotated[
    tuple[int, ...], PlainValidator(partial(_token_ids, limit=MAX_LISTED_IDS), json_schema_input_type=list[int] | None)
]
BadWords = Annotated[tuple[str, ...], PlainValidator(_bad_words, json_schema_input_type=list[str] | None)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None),
]
TopK = Annotated[int, PlainValidator(_top_k, json_schema_input_type=int | None)]
# Parameters whose JSON form is not their type, with validators that check their bounds.
_JSON_FORMS: dict[str, Any] = {
    "allowed_token_ids": AllowedTokenIds,
    "bad_words": BadWords,
    "logit_bias": LogitBias,
    "stop": StopStrings,
    "stop_regex": StopStrings,
    "stop_token_ids": TokenIds,
    "top_k": TopK,
}
Unsupported = Annotated[object, Refused("this server does not support it")]
Truncation = Annotated[
    int | None,
    Field(ge=-1, le=MAX_TOKENS, description="Keep only this many tokens at the end of each prompt; -1: what fits."),
]
PooledTruncation = Annotated[
    int | None,
    Field(
        ge=-1,
        le=MAX_TOKENS,
        description="Shorten each prompt to this many tokens; -1: to what fits. Models that generate text keep the end"
        " of a prompt, others its beginning; the longer text of a pair, and the text in a template, lose their end.",
    ),
]
Salt = Annotated[
    str | None,
    Field(max_length=MAX_SALT_LENGTH, description="Share cached prompts only with requests of the same value."),
]
ProcessorName = Annotated[
    str | None, Field(max_length=256, description="The name of an installed logit processor to apply.")
]
ProcessorParams = Annotated[dict[str, object] | None, Field(description="Parameters of custom_logit_processor.")]
User = Annotated[str | None, NoEffect("a label for abuse statistics, which this server does not have")]


def namespace_of(cache_salt: str | None, extra_key: str | None) -> str:
    """The namespace of the prefix cache for a request with these fields (`RequestSpec.namespace`)."""
    return "\0".join((cache_salt or "", extra_key or "")) if cache_salt or extra_key else ""


def _declaration(declared: object) -> tuple[type, Meta] | None:
    """Type and `Meta` of Annotated[T, Meta] and Annotated[T, Meta] | None."""
    for option in (declared, *get_args(declared)):
        if get_origin(option) is Annotated:
            kind, meta = get_args(option)
            return kind, meta
    return None


class NamedBody(RequestBody):
    """Base of request bodies with a request id."""

    rid: str | None = Field(
        None, min_length=1, max_length=MAX_RID_LENGTH, description="The request id, for example for /abort_request."
    )
    request_id: str | None = Field(None, min_length=1, max_length=MAX_RID_LENGTH, description="vLLM's name of rid.")

    @property
    def own_id(self) -> str | None:
        """The id that the client gave. Raises RequestError for two."""
        if self.rid is not None and self.request_id not in (None, self.rid):
            raise RequestError(
                f"rid = {shorten(self.rid)} and request_id = {shorten(self.request_id)} differ; send one",
                code="invalid_value",
                param="request_id",
            )
        return self.rid or self.request_id


class SamplesTokens(RequestBody):
    """Base of request bodies that sample. `spelled`: the field of this body for each declared field of `Sampling`."""

    spelled: ClassVar[dict[str, str]] = {}

    def sampling(self) -> Sampling:
        """The declared fields that the client set, and the grammar. Raises RequestError for several grammars."""
        values = {name: getattr(self, spelled) for name, spelled in self.spelled.items()}
        sent_values = {name: value for name, value in values.items() if value is not None}
        processor: str | None = getattr(self, "custom_logit_processor", None)
        custom: dict[str, object] | None = getattr(self, "custom_params", None)
        sent = tuple(name for name in sent_values if self.spelled[name] in self.model_fields_set)
        return Sampling(
            **sent_values,
            given=sent,
            grammar=grammar_fields.grammar_of(self),
            grammar_backend=getattr(self, "guided_decoding_backend", None) or "",
            custom_processor=processor or "",
            custom_params="" if custom is None else msgspec.json.encode(custom).decode(),
        )


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
            spelled[name] = spelling = names.get(protocol, name)
            renamed |= {other: spelling for other in (name, *names.values()) if other != spelling}
            bounds: dict[str, Any] = {"gt": meta.gt, "ge": meta.ge, "lt": meta.lt, "le": meta.le}
            if name in _JSON_FORMS:  # these accept null
                fields[spelling] = (_JSON_FORMS[name], Field(parameter.default, description=meta.description))
            else:
                fields[spelling] = (kind | None, Field(None, description=meta.description, **bounds))
        shared = cast(type[Body], create_model("Shared", __base__=SamplesTokens, **fields))
        model = create_model(body.__name__, __base__=(body, shared), __module__=body.__module__, __doc__=body.__doc__)
        model.spelled, model.RENAMED = spelled, {**renamed, **body.RENAMED}
        return model

    return decorate


@sampling_body("openai")
class SamplingBody(NamedBody, SamplesTokens):
    """Fields that `/v1/completions` and `/v1/chat/completions` share, sampling first."""

    RENAMED = {  # noqa: RUF012 - a ClassVar by its declaration in the base
        "stop_strings": "stop",
        "stop_sequences": "stop",
        "repeat_penalty": "repetition_penalty",
        "num_predict": "max_tokens",
        "n_predict": "max_tokens",
    }

    model: str | None = Field(None, description="The name of the served model; optional.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Return log-probabilities of the prompt's tokens, and this many top ones.",
    )
    logprob_token_ids: ListedTokenIds = Field(
        (),
        description=f"Return the log-probabilities of these token ids, too (at most {MAX_LISTED_IDS}), among the top"
        " ones of each position of the output; needs logprobs.",
    )
    stream: bool | None = Field(None, description="Send the output as server-sent events during generation.")
    truncate_prompt_tokens: Truncation = None
    cache_salt: Salt = None
    extra_key: Salt = None
    return_token_ids: bool | None = Field(None, description="Return the token ids of the prompt and of the output.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Show the tokens of log-probabilities as token_id:ID instead of their text."
    )

    response_format: grammar_fields.ResponseFormat = Field(None, description="The format of the output; OpenAI's form.")
    structured_outputs: grammar_fields.StructuredOutputs = Field(
        None, description="What the output must follow; vLLM's form: json, regex, choice, grammar, structural_tag."
    )
    guided_json: grammar_fields.GuidedJson = Field(None, description="A JSON schema that the output follows.")
    guided_regex: grammar_fields.GuidedRegex = Field(None, description="A regular expression for the whole output.")
    guided_choice: grammar_fields.GuidedChoice = Field(None, description="The output is one of these texts.")
    guided_grammar: grammar_fields.GuidedGrammar = Field(None, description="A grammar in Lark or EBNF.")
    guided_whitespace_pattern: str | None = Field(
        None, description="A regular expression for the white space between the tokens of JSON."
    )
    guided_decoding_backend: str | None = Field(
        None, max_length=64, description="auto, or the name of the grammar backend that the server uses."
    )
    json_schema: grammar_fields.JsonSchema = Field(None, description="SGLang's name of guided_json.")
    regex: grammar_fields.Regex = Field(None, description="SGLang's name of guided_regex.")
    ebnf: grammar_fields.Ebnf = Field(None, description="SGLang's name of guided_grammar.")
    structural_tag: grammar_fields.StructuralTag = Field(
        None, description="Free text with constrained parts, as in response_format."
    )

    user: User = None
    metadata: Annotated[dict[str, object] | None, NoEffect("labels of stored outputs; none are stored")] = None
    safety_identifier: Annotated[str | None, NoEffect("like `user`")] = None
    prompt_cache_key: Annotated[str | None, NoEffect("a routing hint; this server has only one cache")] = None

    store: Annotated[object, Refused("outputs are not stored")] = None
    best_of: Annotated[object, Refused("ranking of outputs; use n and rank them in the client")] = None
    use_beam_search: Annotated[object, Refused("beam search")] = None
    length_penalty: Annotated[object, Refused("it belongs to beam search")] = None
    custom_logit_processor: ProcessorName = None
    custom_params: ProcessorParams = None
    logits_processors: Unsupported = None
    lora_path: Annotated[object, Refused("adapters")] = None
    priority: Annotated[object, Refused("all requests have the same priority")] = None
    service_tier: Literal["auto", "default"] | None = Field(
        None, description="There is one tier, default, which the response then names."
    )
    return_hidden_states: Annotated[object, Refused("use /generate, which returns them")] = None
    spaces_between_special_tokens: Annotated[object, Refused("the tokenizer determines the text")] = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    data_parallel_rank: Unsupported = None

    @property
    def namespace(self) -> str:
        """The namespace of the prefix cache (`RequestSpec.namespace`)."""
        return namespace_of(self.cache_salt, self.extra_key)
