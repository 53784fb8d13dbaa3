"""The messages between the engine process and its rank processes.

Tagged, immutable msgspec structs, encoded as MessagePack and never as pickle. A rank handles them in order.

    engine -> rank    Measure, Allocate, RunStep, SampleStep, ControlRank, Ping
    rank -> engine    RankLoaded, Measured, Allocated, Stepped, RankControlled, Pong, Failed
"""

from __future__ import annotations

import zlib

import msgspec

from srv.commands import Answer, Command
from srv.dist.group import RankGroup
from srv.executor.protocol import Allocation, RankMemory
from srv.executor.spec import EngineSpec
from srv.planning.budget import Budget
from srv.sched.late import LateInputs
from srv.sched.plan import Plan, Result


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a rank process needs to start; sent as JSON over its standard input.

    `number`: the rank among those of its engine. `to_rank` and `from_ranks` are socket addresses. `parent` is the
    process id of the engine process; the rank exits when that process has exited.
    """

    engine: EngineSpec
    group: RankGroup
    number: int
    to_rank: str
    from_ranks: str
    parent: int


class Measure(msgspec.Struct, frozen=True, tag=True):
    pass


class Allocate(msgspec.Struct, frozen=True, tag=True):
    budget: Budget


class RunStep(msgspec.Struct, frozen=True, tag=True):
    plan: Plan


class SampleStep(msgspec.Struct, frozen=True, tag=True):
    """Completes a step whose sampling waits for late inputs, such as grammar masks: the rank samples now, and only now
    answers with `Stepped`.
    """

    step: int
    late: LateInputs


class ControlRank(msgspec.Struct, frozen=True, tag=True):
    command: Command


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the rank still handles messages."""


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    rank: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    rank: int
    memory: RankMemory


class Allocated(msgspec.Struct, frozen=True, tag=True):
    rank: int
    allocation: Allocation


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """A rank has run a step. `digest` is that of the result; `result` comes from the first rank only.

    `error`: the step raised this exception; then there is neither. `peer_lost`: the error is RankLost: this rank could
    not reach the others.
    """

    rank: int
    step: int
    digest: int = 0
    result: Result | None = None
    error: str | None = None
    peer_lost: bool = False


class RankControlled(msgspec.Struct, frozen=True, tag=True):
    rank: int
    answer: Answer


class Pong(msgspec.Struct, frozen=True, tag=True):
    rank: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank could not start, or ends because of a bug.

    `lines` are error messages for the operator; `status` is an exit status. `peer_lost`: it could not reach the others.
    """

    rank: int
    lines: list[str]
    status: int
    peer_lost: bool = False


ToRank = Measure | Allocate | RunStep | SampleStep | ControlRank | Ping
FromRank = RankLoaded | Measured | Allocated | Stepped | RankControlled | Pong | Failed


def digest(result: Result) -> int:
    """A checksum of what a step returns; equal on all ranks, or they have diverged.

    All ranks compute from the same hidden states and logits, so log-probabilities and vectors have the same bits, too.
    """
    rows = [
        (
            row.slot,
            row.tokens,
            row.logprobs,
            row.scores,
            row.vectors and zlib.crc32(row.vectors),
            row.error and row.error[0],
        )
        for row in result.rows
    ]
    return zlib.crc32(msgspec.msgpack.encode(rows))
