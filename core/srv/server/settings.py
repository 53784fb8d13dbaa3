"""The settings of the API process, which do not change while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srv.args.groups.observe import ObserveArgs
from srv.grammar.registry import GRAMMAR_OFF
from srv.io.memory_lines import MemoryLine
from srv.io.phases import Phase
from srv.platform.sensors import Readings
from srv.reply.formats import TEXT_ONLY, ReplyFormat
from srv.sample.third_party import ProcessorFacts
from srv.server.http.access import OPEN, Access
from srv.server.http.body import DEFAULT_BODY_LIMITS, BodyLimits
from srv.server.observe.metric_aliases import PoolShape
from srv.server.text.encoded_template import EncodedTemplate
from srv.server.text.fill_in import FillIn
from srv.server.text.options import DEFAULT_TEXT_OPTIONS, TextOptions
from srv.types import PooledHead, Pooling

FULL_PROMPTS_PER_BODY = 4  # prompts of token ids, each as long as the context


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    """How outputs are constrained.

    `backend`: its name; `GRAMMAR_OFF` refuses requests with a grammar, for the reason `why`.
    `vocab_size`: the width of the model's logits. `end_tokens`: of the model. `whitespace_pattern` and `no_whitespace`:
    between the tokens of JSON, unless a request says otherwise.
    """

    backend: str = GRAMMAR_OFF
    why: str = "the server was started with --grammar-backend none; start it with a grammar backend"
    vocab_size: int = 0
    end_tokens: tuple[int, ...] = ()
    whitespace_pattern: str | None = None
    no_whitespace: bool = False


NO_GRAMMARS = GrammarSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits and names. `context_length` and `max_request_tokens` count prompt and output tokens together.

    `context_length`: --context-length, else the model's. `max_request_tokens`: the smaller of that and the KV pool
    (from `Ready`). `vocab_size` limits token ids in requests. `max_prompt_bytes`: longer texts are refused without
    tokenizing them (None: derived from the context length and the longest token). `max_held_request_bytes` limits the
    bodies of all requests without a response together. `max_request_values` limits the JSON values per body (None:
    enough for a few prompts of token ids). `hidden_size`: elements of an embedding and of a hidden state. `access`: who
    may call. `generates`: the model generates text; `headless`: it does not because its weights lack an output layer.
    `pooling`: how prompts are pooled; None: nothing that needs pooling is served. `head`: what follows pooling.
    `score_template`: how a model that generates text is asked whether a document answers a query.
    `model_info` and `server_info` are returned unchanged. `slow_paths`: the parts of every step that a slower path
    computes, each with the reason, for `/metrics`. `memory`: of each rank, the lines of its memory ledger.
    `cache_report`: whether responses say how many prompt tokens the prefix cache had. `stream_interval`: tokens per
    chunk of a stream. `stream_segments`: chunks of `/generate` hold only what is new. `sampling_defaults`: values of
    `Sampling` for the fields that a request omits. `text`: how texts are encoded. `custom_processors`: those that
    requests may name; None: they may name none. `trust_request_chat_template`: requests may bring a chat template.
    `counts_peak`: the ranks know how much memory steps have needed at most. `measures_experts`: they measure how
    evenly experts are used. `startup`: of each process, the phases of its start so far. `sensors`: reads the devices'
    sensors for `/metrics`; None without any. `reply_format`: how the model writes reasoning and tool calls.
    `fill_in`: how prompts with a suffix mark their parts; None: as the tokenizer's tokens say.
    `grammars`: how outputs are constrained. `observe`: what is logged, measured and traced. `pool`: the KV pool, for
    metrics in tokens. `file_storage_path`: the folder of uploaded files.
    """

    model_name: str
    context_length: int
    max_request_tokens: int
    vocab_size: int
    hidden_size: int
    generates: bool = True
    headless: bool = False
    pooling: Pooling | None = None
    head: PooledHead = PooledHead()  # noqa: RUF009 - immutable
    score_template: EncodedTemplate | None = None
    return_hidden_states: bool = False
    access: Access = OPEN
    max_request_bytes: int = DEFAULT_BODY_LIMITS.bytes
    max_held_request_bytes: int = 256 * 1024 * 1024
    max_request_values: int | None = None
    body_seconds: float = DEFAULT_BODY_LIMITS.seconds
    max_stop_strings: int = 16
    max_sequences: int = 1024  # per HTTP request: prompts times n
    max_prompt_bytes: int | None = None
    health_generate_seconds: float = 20.0
    random_seed: int | None = None  # determines the seeds of requests without one, in order of arrival
    system_fingerprint: str = "fp_0"  # of OpenAI's responses: the same as long as weights and configuration are
    created: int = 0  # Unix time reported for the model
    model_info: Mapping[str, Any] = field(default_factory=dict)
    server_info: Mapping[str, Any] = field(default_factory=dict)
    slow_paths: Mapping[str, str] = field(default_factory=dict)
    memory: Sequence[Sequence[MemoryLine]] = ()
    counts_peak: bool = False
    measures_experts: bool = False
    startup: Callable[[], Mapping[str, Sequence[Phase]]] = dict
    sensors: Callable[[], Readings] | None = None
    reply_format: ReplyFormat = TEXT_ONLY
    fill_in: FillIn | None = None
    grammars: GrammarSettings = NO_GRAMMARS
    observe: ObserveArgs = ObserveArgs()  # noqa: RUF009 - immutable
    pool: PoolShape = PoolShape()  # noqa: RUF009 - immutable
    cache_report: bool = True
    stream_interval: int = 1
    stream_segments: bool = False
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    text: TextOptions = DEFAULT_TEXT_OPTIONS
    root_path: str = ""  # under which a proxy serves this server
    access_log: bool = False
    ui: bool = True  # the built-in page at /
    trust_request_chat_template: bool = False
    custom_processors: Mapping[str, ProcessorFacts] | None = None
    file_storage_path: Path = Path("srv_storage")

    @property
    def body_limits(self) -> BodyLimits:
        values = self.max_request_values
        if values is None:
            values = max(DEFAULT_BODY_LIMITS.values, FULL_PROMPTS_PER_BODY * self.context_length)
        size = min(self.max_request_bytes, self.max_held_request_bytes)
        return BodyLimits(size, values, self.body_seconds)

    @property
    def embedding_size(self) -> int:
        """Elements of an embedding that is not cut."""
        return self.head.dense[-1].outputs if self.head.dense else self.hidden_size

    @property
    def request_token_limit(self) -> int:
        """The maximum number of tokens per request, prompt and output."""
        return min(self.context_length, self.max_request_tokens)
