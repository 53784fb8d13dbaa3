"""What the API process and the engine process say to each other.

Tagged msgspec structs, encoded as MessagePack; never pickle. A message is immutable once made.
The module must not know how messages travel (`channel` does) or what the engine does with them.

    API process  -> engine   Generate, Abort, Finish, FlushCache, GetStats, Drain
    engine -> API process    Ready, LoadFailed, Outputs (a batch, one wake-up a step), Stats, Flushed, Drained
"""

from __future__ import annotations

import msgspec

from srv.types import FinishReason, SamplingParams, TokenLogprob


class Generate(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One sequence to generate. `request` is unique among live requests; `n` is expanded by the sender.

    `namespace` separates prefix-cache entries (adapter, tenant): equal tokens in different namespaces
    share nothing.
    """

    request: str
    tokens: list[int]
    params: SamplingParams
    namespace: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop these requests (all of them if `requests` is None); each still gets a last Output, ABORT."""

    requests: list[str] | None


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The API process has seen a stop string: end the request; no further Output is sent for it."""

    request: str


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Forget the prefix cache. Refused (Flushed.done False) while requests run."""

    call: int


class GetStats(msgspec.Struct, frozen=True, tag=True):
    call: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Graceful shutdown: finish what runs within `seconds`, abort the rest, say Drained, exit."""

    seconds: float


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What one step brought one request. `tokens` may be empty (a prompt chunk) or several (speculation).

    `prompt_logprobs[i]` belongs to prompt position `prompt_logprobs_start + i` over all Outputs of the
    request together; the very first prompt token has none and is not listed.
    `prompt_tokens` and `cached_tokens` (prefix-cache hits, tokens) are set from the first Output on.
    `error` goes with FinishReason.ERROR: (code, message) for the client.
    """

    request: str
    tokens: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None  # the end token that ended it; it is also the last of `tokens`
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: tuple[str, str] | None = None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[Output]


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine has loaded and measured. `pages` is the budget per cache group, usable pages each."""

    platform: str
    device: str
    model: str
    pages: list[int]
    page_size: int
    max_request_tokens: int  # a request of more tokens (prompt and output) can never run
    budget: list[tuple[str, str]]  # the budget's story: (quantity, sentence)
    load_seconds: float
    graph_rows: list[int] = []  # row counts of which steps were captured


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start. `lines` are complete error texts for the operator."""

    lines: list[str]
    status: int  # exit status for the launcher: 2 the operator can fix it, 1 our bug


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A snapshot. Pages are summed over cache groups; counters run since start.

    `call` answers GetStats; -1 is a periodic report.
    """

    call: int
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int  # in the prefix tree, unlocked
    pages_held: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    steps: int
    retractions: int
    finished: int
    aborted: int
    replayed_steps: int = 0  # steps that replayed a captured one
    eager_steps: int = 0  # steps that were launched kernel by kernel


class Flushed(msgspec.Struct, frozen=True, tag=True):
    call: int
    done: bool
    reason: str = ""


class Drained(msgspec.Struct, frozen=True, tag=True):
    aborted: int


ToEngine = Generate | Abort | Finish | FlushCache | GetStats | Drain
FromEngine = Ready | LoadFailed | Outputs | Stats | Flushed | Drained
