"""Tokens per second of this server and llama.cpp with the same GGUF file of a mixture of experts.

    python tests/bench/peers/install.py --peers llama_cpp
    python tests/bench/peers/experts_race.py [--rounds 3] [--peers srv llama_cpp] [--json FILE]

The file has random weights in Qwen3-30B-A3B's proportions (`experts_file.py`); it is written once, to `build/peers`.
Both servers run before each other in turn, on the same cores, with the settings of `catalogue.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import experts_file
import install
import raced
import turns
from bench_loads import WORKLOADS
from catalogue import PEERS, Peer
from machine import describe
from rich.console import Console
from rich.table import Table

from srv.models.locate import demo_model

FILE = install.HOME / "experts-Q4_0.gguf"
LOADS = WORKLOADS[:4]
ENGINES = ("srv", "llama_cpp")


def servers(engines: Sequence[str], file: Path) -> list[Peer]:
    """The first server of each engine in the catalogue, serving this file."""
    packed_peers = [next(peer for peer in PEERS if peer.engine == engine and peer.packed) for engine in engines]
    return [_with_file(peer, file) for peer in packed_peers]


def _with_file(peer: Peer, file: Path) -> Peer:
    if peer.engine == "srv":
        return replace(peer, arguments=(*peer.arguments, "--model-path", str(file)))
    arguments = list(peer.arguments)
    arguments[arguments.index("--model") + 1] = str(file)
    return replace(peer, arguments=arguments)


def show(figures: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("load", "server", "tokens/s", "÷ llama.cpp")
    for load, rates in figures.items():
        for engine, rate in rates.items():
            ratio = f"{rate / rates['llama_cpp']:.2f}" if "llama_cpp" in rates else ""
            table.add_row(load, engine, f"{rate:.1f}", ratio)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not FILE.exists():
        FILE.parent.mkdir(parents=True, exist_ok=True)
        experts_file.write(FILE, demo_model())
    figures = turns.measure(servers(options.peers, FILE), LOADS, options.rounds, raced.model_shape().vocab)
    show(figures)
    if options.json is not None:
        content = {"machine": describe(), "commit": raced.commit(), "tokens_s": figures}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
