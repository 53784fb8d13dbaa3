"""Compare executors: one rank in this process and in one of its own, and one rank with two or more.

    python tests/bench/ranks.py [--model-path PATH] [--ranks 1 3] [--rounds 3] [--output 64]

Prints the median and best tokens per second of each, and ratios. The engines run alternately, so that a busy machine
slows all of them. Owns the measurement; a test must not assert its results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from srv.executor.multi_process import MultiProcessExecutor
from srv.models.locate import demo_model
from srv.testing.engine import LocalEngine
from srv.types import RequestSpec, SamplingParams

PROMPT = tuple(range(100, 164))
ROWS = (1, 4)


class ApartEngine(LocalEngine):
    """One rank in a process of its own."""

    make_executor = MultiProcessExecutor


def tokens_per_second(engine: LocalEngine, rows: int, output: int, number: int) -> float:
    """Decode `rows` requests together; each prompt begins differently, so that no prefix is cached."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    requests = [
        RequestSpec(id=f"{number}.{row}", tokens=(10 + number * 8 + row, *PROMPT), params=params) for row in range(rows)
    ]
    started = time.perf_counter()
    engine.generate(requests)
    return rows * output / (time.perf_counter() - started)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, default=None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[3], help="numbers of ranks to compare with one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=int, default=64)
    options = parser.parse_args(arguments)
    path = options.model_path or demo_model()
    flags = ["--model-path", str(path), "--max-running-requests", str(max(ROWS)), "--log-level", "warning"]
    with ExitStack() as stack:
        engines = {
            "one rank, in process": stack.enter_context(LocalEngine.launch(flags)),
            "one rank, a process of its own": stack.enter_context(ApartEngine.launch(flags)),
        }
        for ranks in options.ranks:
            sharded = LocalEngine.launch([*flags, "--tp-size", str(ranks)])
            engines[f"{ranks} ranks"] = stack.enter_context(sharded)
        for rows in ROWS:
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(options.rounds + 1):
                for name, engine in engines.items():
                    speed = tokens_per_second(engine, rows, options.output, number)
                    if number:  # the first round warms up
                        speeds[name].append(speed)
            report(rows, speeds)


def report(rows: int, speeds_by_ranks: dict[str, list[float]]) -> None:
    """One line per engine; the best of the rounds is what a machine with other work disturbs least."""
    first = next(iter(speeds_by_ranks.values()))
    for name, speeds in speeds_by_ranks.items():
        median, best = statistics.median(speeds), max(speeds)
        ratios = f"median {median / statistics.median(first):.3f}, best {best / max(first):.3f}"
        print(f"{rows} rows, {name}: {median:.1f} tokens/s, best {best:.1f}; of one rank in process: {ratios}")


if __name__ == "__main__":
    main(sys.argv[1:])
