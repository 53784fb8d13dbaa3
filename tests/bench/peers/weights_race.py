"""Tokens per second of this server and vLLM with the same checkpoints of 4-bit and 8-bit weights.

    python tests/bench/peers/install.py --peers vllm
    python tests/bench/peers/weights_race.py [--rounds 3] [--formats awq w8a8] [--peers srv vllm] [--json FILE]

The checkpoints are the demo model, quantized by plain rounding in the layouts of AWQ and compressed-tensors, and
written once to `build/peers/models`. Both servers run before each other in turn, on the same cores, with the settings
of `catalogue.py`. At the end each computes the perplexity of one text, which shows that both compute what is stored.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))

import install
import mixed_weights
import perplexity
import raced
import turns
import weight_methods
from bench_loads import WORKLOADS
from catalogue import PEERS, Peer
from machine import describe
from rich.console import Console
from rich.table import Table
from weight_methods import METHODS, Method

LOADS = WORKLOADS[:4]
ENGINES = ("srv", "vllm")
INT8 = mixed_weights.of_int8()
FORMATS = {
    "awq": METHODS["awq, groups of 64"],
    "w8a8": Method(
        "Q8_0",
        lambda name, weight: INT8.stored(name, weight)[0],
        mixed_weights.config_of({("Linear",): INT8}, "int-quantized"),
    ),
}


class Result(NamedTuple):
    """The figures of one format: `rates` by load and engine, `perplexities` by engine."""

    rates: Mapping[str, Mapping[str, float]]
    perplexities: Mapping[str, float]


def checkpoint(form: str, plain: Path) -> Path:
    """The folder of a format, which is written if it does not exist; `plain`: the model in bfloat16."""
    folder = plain.with_name(f"{plain.name}-{form}")
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(plain, part, ignore=shutil.ignore_patterns("*.safetensors"))  # the tokenizer
        weight_methods.write(part, plain, FORMATS[form])
        part.rename(folder)
    return folder


def servers(engines: Sequence[str], folder: Path) -> list[Peer]:
    """The first server of each engine in the catalogue, serving this checkpoint."""
    return [_with_folder(next(peer for peer in PEERS if peer.engine == engine), folder) for engine in engines]


def _with_folder(peer: Peer, folder: Path) -> Peer:
    if peer.engine == "srv":
        return replace(peer, arguments=(*peer.arguments, "--model-path", str(folder)))
    plain = str(install.folder_model())
    return replace(peer, arguments=[str(folder) if argument == plain else argument for argument in peer.arguments])


def measure(form: str, engines: Sequence[str], rounds: int, ids: Sequence[int]) -> Result:
    """The figures of a format; `ids`: the tokens of the text whose perplexity is computed."""
    perplexities: dict[str, float] = {}

    def score(peer: Peer, port: int) -> None:
        perplexities[peer.engine] = perplexity.over_http(port, ids, peer.model)

    peers = servers(engines, checkpoint(form, install.folder_model()))
    return Result(turns.measure(peers, LOADS, rounds, raced.model_shape().vocab, score), perplexities)


def table(results: Mapping[str, Result]) -> Table:
    shown = Table("weights", "load", "srv", "vLLM", "srv ÷ vLLM")
    for form, result in results.items():
        rows = {**result.rates, "perplexity": result.perplexities}
        for load, figures_of in rows.items():
            figures = [f"{figures_of[name]:.1f}" if name in figures_of else "–" for name in ENGINES]
            both = load != "perplexity" and len(figures_of) == len(ENGINES)
            shown.add_row(form, load, *figures, f"{figures_of['srv'] / figures_of['vllm']:.2f}" if both else "")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--peers", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not (install.folder_model() / "config.json").exists():
        install.write_folder()
    ids = raced.text_tokens()
    results = {form: measure(form, options.peers, options.rounds, ids) for form in options.formats}
    Console(width=100).print(table(results))
    if options.json is not None:
        content = {"machine": describe(), "commit": raced.commit()}
        content["formats"] = {form: result._asdict() for form, result in results.items()}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
