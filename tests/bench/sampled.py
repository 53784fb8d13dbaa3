"""What sampling costs this server: tokens a second with temperature 1 beside those of greedy requests.

    python tests/bench/sampled.py [--rounds 3] [--json FILE]

The server of the race's own entry is started once. In a round every way of choosing tokens takes its turn at each load,
forwards, then backwards, and so on; a short load is repeated. A figure is the median over rounds. Answers have the same
length in all of them.
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
from bench_loads import POINTS, Point, Prompts
from catalogue import PEERS
from race import LOGS, order, repeated
from rich.console import Console
from rich.table import Table
from serving import Serving
from stream_client import GREEDY, run_load

GREEDILY = "greedy"
WAYS: Mapping[str, Mapping[str, object]] = {
    GREEDILY: GREEDY,
    "temperature 1": {"temperature": 1},
    "temperature 1, top_p 0.95": {"temperature": 1, "top_p": 0.95},
    "temperature 1, top_k 50": {"temperature": 1, "top_k": 50},
}
STREAMS = (POINTS[0], POINTS[2])

Figures = dict[str, dict[str, dict[str, object]]]


def measure(port: int, points: Sequence[Point], rounds: int, prompts: Prompts) -> Figures:
    """By load and way: tokens a second, their ratio to the greedy ones, and the seconds of each round."""
    for point in points:
        for sampling in WAYS.values():  # what a way needs is made ready before it is timed
            run_load(port, replace(point, output=8), prompts, sampling=sampling)
    seconds: dict[str, dict[str, list[float]]] = {point.name: {way: [] for way in WAYS} for point in points}
    for number in range(rounds):
        for point in points:
            for way in (list(WAYS)[index] for index in order(len(WAYS), number)):
                seconds[point.name][way].append(_round(port, point, prompts, WAYS[way]))
    return {point.name: _figures(point, seconds[point.name]) for point in points}


def _round(port: int, point: Point, prompts: Prompts, sampling: Mapping[str, object]) -> float:
    spent: list[float] = []
    while not repeated(spent):
        spent.append(run_load(port, point, prompts, sampling=sampling).seconds)
    return statistics.median(spent)


def _figures(point: Point, seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, object]]:
    middle = {way: statistics.median(each) for way, each in seconds.items()}
    return {
        way: {
            "tokens_s": round(point.counted / middle[way], 1),
            "ratio": round(middle[GREEDILY] / middle[way], 3),
            "rounds_s": [round(each, 4) for each in seconds[way]],
        }
        for way in seconds
    }


def show(figures: Figures) -> None:
    table = Table("load", "chosen", "tokens/s", "÷ greedy")
    for load, ways in figures.items():
        for way, found in ways.items():
            table.add_row(load, way, f"{found['tokens_s']:.1f}", f"{found['ratio']:.2f}")
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
