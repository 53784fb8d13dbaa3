"""The messages between the API process and the engine process.

Tagged, immutable msgspec structs, encoded as MessagePack and never as pickle.
This module must not know how messages are transported (see `channel`) or what the engine does with them.

    API process  -> engine   RequestSpec, Abort, Finish, FlushCache, GetStats, Control, Drain
    engine -> API process    Ready, LoadFailed, Outputs (one message per step), Stats, Flushed, Controlled,
                             Drained, Ended
"""

from __future__ import annotations

import msgspec

from srv.commands import Answer, Command
from srv.types import FinishReason, RequestSpec, TokenLogprob


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Abort these requests (None: all). Each of them still gets a last Output with FinishReason.ABORT."""

    requests: list[str] | None


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End a request because the API process found a stop string in its text. It gets no further Output."""

    request: str


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Clear the prefix cache. Refused (`Flushed.done` is False) while requests are running.

    `call` identifies the request, and the reply repeats it; the same holds for GetStats and Control.
    """

    call: int


class GetStats(msgspec.Struct, frozen=True, tag=True):
    call: int


class Control(msgspec.Struct, frozen=True, tag=True):
    """Let every rank carry out a command, as soon as the steps in flight have ended."""

    call: int
    command: Command


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Graceful shutdown: finish requests for up to `seconds`, abort the rest, send Drained, and exit."""

    seconds: float


class Output(msgspec.Struct, frozen=True, array_like=True):
    """The result of one step for one request. `tokens` may be empty (a prompt chunk) or several (speculation).

    `prompt_logprobs`, concatenated over all Outputs of the request, has one entry per prompt position from
    `prompt_logprobs_start` on; the first token of the prompt has no log-probability and no entry.
    `vectors`: float32, little-endian: the embedding of a request with PoolingParams, or the hidden states of the
    positions computed in this step, in order.
    `cached_tokens`: prompt tokens found in the prefix cache, set in every Output.
    `error` is (code, message) for the client if `finish` is FinishReason.ERROR.
    """

    request: str
    tokens: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None  # the end or stop token that ended the request; also the last of `tokens`
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    error: tuple[str, str] | None = None
    vectors: bytes | None = None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[Output]


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine has loaded its model and serves. `pages`: usable pages per cache group."""

    device: str
    model: str
    pages: list[int]
    page_size: int
    max_request_tokens: int  # prompt and output; larger requests are refused
    budget: list[tuple[str, str]]  # how the memory budget was computed: (quantity, explanation)
    load_seconds: float
    graph_rows: list[int] = []  # row counts for which a step was captured


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start. `lines` are complete error messages for the operator."""

    lines: list[str]
    status: int  # exit status for the launcher: 2 if the operator can fix the cause, 1 for a bug in srv


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A snapshot. Page counts are summed over cache groups; counters start at 0 with the engine.

    `call` is that of the GetStats message that it answers; -1 in periodic reports.
    """

    call: int
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int  # in the prefix tree and not used by a running request
    pages_held: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    steps: int
    retractions: int
    finished: int
    aborted: int
    drafts_proposed: int = 0  # draft tokens that were verified
    drafts_accepted: int = 0  # those of them that were right
    replayed_steps: int = 0  # steps that replayed a captured graph
    eager_steps: int = 0  # steps that launched their kernels one by one
    hooks_switched_off: dict[str, str] = {}  # in the engine process: why, by hooks plugin


class Flushed(msgspec.Struct, frozen=True, tag=True):
    call: int
    done: bool
    reason: str = ""


class Controlled(msgspec.Struct, frozen=True, tag=True):
    """The answers of all ranks to a command, in the order of ranks."""

    call: int
    answers: list[Answer]


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Every request has ended; the engine process exits."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The engine process exits, because it lost something that it cannot go on without; `reason` names it."""

    reason: str


ToEngine = RequestSpec | Abort | Finish | FlushCache | GetStats | Control | Drain
FromEngine = Ready | LoadFailed | Outputs | Stats | Flushed | Controlled | Drained | Ended
