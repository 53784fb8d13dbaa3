"""A rank process that follows a script instead of computing: `python -m scripted_rank`.

SRV_TEST_RANK_SCRIPT is JSON: for each rank its behaviour at the first step, one of

    "answer"    the digest 1        "diverge"   the digest 2        "fail"    an error        "lose"  cannot reach
    others "exit"      ends, status 3      "silent"    does not answer     "late"    the digest 1, after a second
    "refuse"    does not load, with a message for the operator
"""

from __future__ import annotations

import json
import os
import sys
import time

import msgspec
import zmq

from srv.commands import Answer
from srv.executor.protocol import Allocation, RankMemory
from srv.executor.rank_messages import (
    Allocate,
    Allocated,
    Control,
    Controlled,
    Failed,
    FromRank,
    Loaded,
    Measure,
    Measured,
    Ping,
    Pong,
    RankSpec,
    Step,
    Stepped,
    ToRank,
)
from srv.sched.plan import Result

VARIABLE = "SRV_TEST_RANK_SCRIPT"
EXIT_STATUS = 3


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    rank, context = spec.group.rank, zmq.Context()
    behaviour = json.loads(os.environ[VARIABLE])[rank]
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(spec.to_rank)
    outbox.connect(spec.from_ranks)

    def send(message: FromRank) -> None:
        outbox.send(msgspec.msgpack.encode(message))

    send(Failed(rank, [f"rank {rank} refuses"], 2) if behaviour == "refuse" else Loaded(rank))
    while os.getppid() == spec.parent:
        if not inbox.poll(100):
            continue
        match msgspec.msgpack.decode(inbox.recv(), type=ToRank):
            case Measure():
                send(Measured(rank, RankMemory(rank, "host", 1000 - rank, 2000, 10 + rank)))
            case Allocate(budget):
                send(Allocated(rank, Allocation(rank, budget.pages[0], ())))
            case Ping(number) if behaviour != "silent":
                send(Pong(rank, number))
            case Control() if behaviour != "silent":
                send(Controlled(rank, Answer([f"file of {rank}"])))
            case Step(plan):
                answer(behaviour, rank, plan.step, send)


def answer(behaviour: str, rank: int, step: int, send) -> None:  # type: ignore[no-untyped-def]
    result = Result(step, ()) if rank == 0 else None
    match behaviour:
        case "answer" | "diverge" | "late":
            time.sleep(1 if behaviour == "late" else 0)
            send(Stepped(rank, step, 2 if behaviour == "diverge" else 1, result))
        case "fail" | "lose":
            send(Stepped(rank, step, error="ValueError: scripted", peer_lost=behaviour == "lose"))
        case "exit":
            os._exit(EXIT_STATUS)


if __name__ == "__main__":
    main()
