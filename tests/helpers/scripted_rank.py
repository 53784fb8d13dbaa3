"""A rank process that follows a script instead of computing: `python -m scripted_rank`.

SRV_TEST_RANK_SCRIPT is JSON: for each rank its behaviour, at the first step or at PHASE: "load", "measure", "allocate"

    "answer"    the digest 1        "diverge"   the digest 2        "late"    the digest 1, after a second
    "fail"      an error            "lose"      cannot reach others "silent"  does not answer
    "exit"      ends, status 3      "break"     fails outside of the step
    "PHASE refuse"    does not start, with a message for the operator
    "PHASE lose"      does not start, because it cannot reach the others
    "PHASE exit"      ends a moment later, status 3
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

from srv.commands import Answer
from srv.executor.protocol import Allocation, RankMemory
from srv.executor.rank_messages import (
    Allocate,
    Allocated,
    ControlRank,
    Failed,
    FromRank,
    Measure,
    Measured,
    Ping,
    Pong,
    RankControlled,
    RankLoaded,
    RankSpec,
    RunStep,
    Stepped,
    ToRank,
)
from srv.executor.spec import decode
from srv.sched.plan import Result

VARIABLE = "SRV_TEST_RANK_SCRIPT"
EXIT_STATUS = 3


def main() -> None:
    spec = decode(sys.stdin.buffer.read(), RankSpec)
    rank, context = spec.group.rank, zmq.Context()
    behaviour = json.loads(os.environ[VARIABLE])[rank]
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(spec.to_rank)
    outbox.connect(spec.from_ranks)
    directory = Path(spec.group.directory)
    (directory / f"met_{rank}").touch()

    def send(message: FromRank) -> None:
        outbox.send(msgspec.msgpack.encode(message))

    def prepare(phase: str, answer: FromRank) -> None:
        if behaviour == f"{phase} exit":
            time.sleep(0.2)
            os._exit(EXIT_STATUS)
        if behaviour == f"{phase} lose":
            while len(list(directory.glob("met_*"))) < spec.group.size:
                time.sleep(0.01)
        lose = behaviour == f"{phase} lose"
        failed = lose or behaviour == f"{phase} refuse"
        send(Failed(rank, [behaviour], 1 if lose else 2, peer_lost=lose) if failed else answer)

    prepare("load", RankLoaded(rank))
    while os.getppid() == spec.parent:
        if not inbox.poll(100):
            continue
        match msgspec.msgpack.decode(inbox.recv(), type=ToRank):
            case Measure():
                prepare("measure", Measured(rank, RankMemory("host", 1000 - rank, 2000, 10 + rank)))
            case Allocate(budget):
                prepare("allocate", Allocated(rank, Allocation(budget.pages[0], ())))
            case Ping() if behaviour != "silent":
                send(Pong(rank))
            case ControlRank() if behaviour != "silent":
                send(RankControlled(rank, Answer([f"file of {rank}"])))
            case RunStep(plan):
                answer(behaviour, rank, plan.step, send)


def answer(behaviour: str, rank: int, step: int, send) -> None:  # type: ignore[no-untyped-def]
    result = Result(step, ()) if rank == 0 else None
    match behaviour:
        case "answer" | "diverge" | "late":
            time.sleep(1 if behaviour == "late" else 0)
            send(Stepped(rank, step, 2 if behaviour == "diverge" else 1, result))
        case "fail" | "lose":
            send(Stepped(rank, step, error="ValueError: scripted", peer_lost=behaviour == "lose"))
        case "break":
            send(Failed(rank, ["KeyError: scripted"], 1))
        case "exit":
            os._exit(EXIT_STATUS)


if __name__ == "__main__":
    main()
