"""The messages between the API process and the engine process.

Tagged, immutable msgspec structs, encoded as MessagePack and never as pickle.
This module must not know how messages are transported (see `channel`) or what the engine does with them.

    API process  -> engine   RequestSpec, Vocabulary, Abort, Finish, FlushCache, GetStats, Control, Pause,
                             SetLogLevel, Drain
    engine -> API process    Ready, LoadFailed, Outputs (one message per step), Stats, Flushed, Paused, Controlled,
                             Drained, Ended
"""

from __future__ import annotations

import msgspec

from srv.commands import Answer, Command
from srv.io.memory_lines import MemoryLine
from srv.io.phases import Phase
from srv.types import FinishReason, RequestSpec, TokenLogprob, Vocabulary


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


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Plan no further steps (`paused`), or go on. `retract`: running requests give up their slots and pages meanwhile.

    Answered by `Paused` when no step is in flight.
    """

    call: int
    paused: bool
    retract: bool = False


class SetLogLevel(msgspec.Struct, frozen=True, tag=True):
    """The minimum severity that the engine process logs from now on, in upper case."""

    level: str


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
    `scheduled_at`: when the scheduler first gave the request a slot, by `time.perf_counter`; set at least in the first
    Output with tokens and in the last one, of a request that had a slot.
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
    scheduled_at: float | None = None


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
    kernels: dict[str, str] = {}  # what rank 0 has bound, by the keys of a kernel plan
    memory: list[list[MemoryLine]] = []  # of each rank, the lines of its memory ledger
    counts_peak: bool = False  # the ranks know how much memory steps have needed at most
    phases: dict[str, list[Phase]] = {}  # of the engine process and of each rank process, the phases of its start


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
    state_slots_total: int = 0  # for recurrent states of prefixes; 0 in a model without such states
    state_slots_cached: int = 0  # in the prefix tree
    state_slots_held: int = 0  # of running requests, for prefixes that are not in the tree yet
    drafts_proposed: int = 0  # draft tokens that were verified
    drafts_accepted: int = 0  # those of them that were right
    replayed_steps: int = 0  # steps that replayed a captured graph, or pieces of one
    piecewise_steps: int = 0  # those of them that replayed pieces
    compiled_steps: int = 0  # steps that ran the compiled function
    eager_steps: int = 0  # steps that launched their kernels one by one
    slow_steps: dict[str, int] = {}  # those that no graph covered, by `srv.sched.plan.SlowReason`
    overlapped_steps: int = 0  # steps that were planned while another one ran
    hooks_switched_off: dict[str, str] = {}  # in the engine process: why, by hooks plugin
    inert: dict[str, str] = {}  # why, and what to do, by feature that is on and has had no effect
    paused: bool = False  # no steps are planned until somebody lets it go on
    step_tokens: list[int] = []  # steps by the number of tokens that they computed (`srv.io.step_tokens`)
    computed_tokens: int = 0  # of all steps: positions of prompts and outputs, and drafts


class Flushed(msgspec.Struct, frozen=True, tag=True):
    call: int
    done: bool
    reason: str = ""


class Paused(msgspec.Struct, frozen=True, tag=True):
    """Whether the engine is paused now."""

    call: int
    paused: bool


class Controlled(msgspec.Struct, frozen=True, tag=True):
    """The answers of all ranks to a command, in the order of ranks."""

    call: int
    answers: list[Answer]


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Every request has ended; the engine process exits."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The engine process exits, because it lost something that it cannot go on without; `reason` names it."""

    reason: str


ToEngine = RequestSpec | Vocabulary | Abort | Finish | FlushCache | GetStats | Control | Pause | SetLogLevel | Drain
FromEngine = Ready | LoadFailed | Outputs | Stats | Flushed | Paused | Controlled | Drained | Ended
