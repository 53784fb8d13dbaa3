"""Tokens per second of servers that run in turns, for races with other checkpoints than `race.py` has.

Owns the rounds and their medians. Must not know the checkpoints.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bench_loads import Prompts, Workload
from catalogue import Peer
from race import FAULTS, LOGS, order, repeated
from serving import Serving
from stream_client import run_load


def measure(
    peers: Sequence[Peer],
    loads: Sequence[Workload],
    rounds: int,
    vocab: int,
    finish: Callable[[Peer, int], None] = lambda peer, port: None,
) -> dict[str, dict[str, float]]:
    """Median tokens per second by load and engine; no figures for an engine that fails.

    In a round, a short load is repeated and its median is used. `finish`: called with each server and its port at the
    end of its last turn.
    """
    spent: dict[str, dict[str, list[float]]] = {load.name: {} for load in loads}
    for number in range(rounds):
        for peer in (peers[index] for index in order(len(peers), number)):
            try:
                with Serving(peer, LOGS / f"{peer.name.replace(' ', '_')}.log") as serving:
                    for name, seconds in _turn(peer, serving.port, loads, Prompts(vocab, seed=number)):
                        spent[name].setdefault(peer.engine, []).append(seconds)
                    if number == rounds - 1:
                        finish(peer, serving.port)
            except FAULTS as error:
                print(f"{peer.name}: {error}", file=sys.stderr)
    return {
        load.name: {name: load.counted / statistics.median(spent_s) for name, spent_s in spent[load.name].items()}
        for load in loads
    }


def _turn(peer: Peer, port: int, loads: Sequence[Workload], prompts: Prompts) -> Iterator[tuple[str, float]]:
    for load in loads:
        run_load(port, replace(load, output=min(load.output, 8)), prompts, peer.model)  # warm-up
    for load in loads:
        seconds: list[float] = []
        while not repeated(seconds):
            seconds.append(run_load(port, load, prompts, peer.model).seconds)
        yield load.name, statistics.median(seconds)
