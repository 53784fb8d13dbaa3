"""How much sampling costs this server: tokens per second with temperature 1 compared with greedy requests.

    python tests/bench/sampled.py [--rounds 3] [--json FILE]

The server is started once, as in the peer benchmark. A round runs each load with every kind of sampling parameters,
forwards, then backwards, and so on; a short load is repeated. A figure is the median over rounds. All answers have the
same length.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import raced
from bench_loads import WORKLOADS, Prompts, Workload
from catalogue import PEERS
from race import LOGS, order, repeated
from rich.console import Console
from rich.table import Table
from serving import Serving
from stream_client import GREEDY, run_load

GREEDY_NAME = "greedy"
SAMPLINGS: Mapping[str, Mapping[str, object]] = {
    GREEDY_NAME: GREEDY,
    "temperature 1": {"temperature": 1},
    "temperature 1, top_p 0.95": {"temperature": 1, "top_p": 0.95},
    "temperature 1, top_k 50": {"temperature": 1, "top_k": 50},
}
STREAMS = (WORKLOADS[0], WORKLOADS[2])

Figures = dict[str, dict[str, dict[str, object]]]


def measure(port: int, workloads: Sequence[Workload], rounds: int, prompts: Prompts) -> Figures:
    """By load and sampling: tokens per second, the ratio to greedy, and the seconds of each round."""
    for workload in workloads:
        for sampling in SAMPLINGS.values():  # warm-up
            run_load(port, replace(workload, output=8), prompts, sampling=sampling)
    seconds: dict[str, dict[str, list[float]]] = {
        workload.name: {name: [] for name in SAMPLINGS} for workload in workloads
    }
    for number in range(rounds):
        for workload in workloads:
            for name in (list(SAMPLINGS)[index] for index in order(len(SAMPLINGS), number)):
                seconds[workload.name][name].append(_round(port, workload, prompts, SAMPLINGS[name]))
    return {workload.name: _figures(workload, seconds[workload.name]) for workload in workloads}


def _round(port: int, workload: Workload, prompts: Prompts, sampling: Mapping[str, object]) -> float:
    spent: list[float] = []
    while not repeated(spent):
        spent.append(run_load(port, workload, prompts, sampling=sampling).seconds)
    return statistics.median(spent)


def _figures(workload: Workload, seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, object]]:
    middle = {name: statistics.median(second) for name, second in seconds.items()}
    return {
        name: {
            "tokens_s": round(workload.counted / middle[name], 1),
            "ratio": round(middle[GREEDY_NAME] / middle[name], 3),
            "rounds_s": [round(second, 4) for second in seconds[name]],
        }
        for name in seconds
    }


def show(figures: Figures) -> None:
    table = Table("load", "sampling", "tokens/s", "÷ greedy")
    for load, samplings in figures.items():
        for name, by_sampling in samplings.items():
            table.add_row(load, name, f"{by_sampling['tokens_s']:.1f}", f"{by_sampling['ratio']:.2f}")
    Console(width=100).print(table)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    prompts = Prompts(raced.model_shape().vocab, seed=3)
    with Serving(PEERS[0], LOGS / "sampled.log") as serving:
        figures = measure(serving.port, STREAMS, options.rounds, prompts)
    show(figures)
    if options.json is not None:
        options.json.write_text(json.dumps({"commit": raced.commit(), "loads": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
