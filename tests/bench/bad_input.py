"""How much bad input slows a running stream: its inter-token time without load and under two storms of bad input.

    python tests/bench/bad_input.py [--rounds 5] [--tokens 300] [--rate 100] [--json FILE] [-- arguments for srv]

The storms come from a separate process, where each client sends one request after the other. `refused` sends every bad
input of the end-to-end tests. In `refused and leaving` every tenth request asks for a long stream and is cancelled by
its client after a few tokens, which is work for the engine. The three kinds take turns, so that a machine whose speed
changes affects all of them. Real clients run on other machines, so these run at the lowest priority.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

# The servers and the bad inputs of the end-to-end tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from bad_inputs import BAD_INPUTS, LIMITS
from e2e_support import Server, events, greedy, launched, leave_after

QUIET, REFUSED, LEAVING = "quiet", "refused", "refused and leaving"
LEAVE_EVERY = 10
SETTLE_S = 0.5  # for a storm to start, and for its last requests to end


# ---- the storm, in a process of its own


async def _client(
    http: httpx.AsyncClient, number: int, clients: int, rate: float, leaving: bool, tally: list[int]
) -> None:
    began = time.perf_counter()
    for count in range(number, sys.maxsize, clients):
        await asyncio.sleep(began + count / rate - time.perf_counter())
        if leaving and count % LEAVE_EVERY == 0:
            await leave_after(http, greedy(f"Visitor {count}", 200), 3)
        else:
            bad = BAD_INPUTS[count % len(BAD_INPUTS)]
            response = await http.post(bad.path, content=bad.body)
            if response.status_code != bad.status:
                raise RuntimeError(f"{bad.name}: {response.status_code} {response.text}")
        tally[0] += 1


async def storm(base: str, clients: int, rate: float, leaving: bool) -> None:
    """Send at most `rate` requests per second until standard input closes, then print the rate that was reached."""
    os.nice(19)
    tally = [0]
    async with httpx.AsyncClient(base_url=base, timeout=60) as http:
        sending = [
            asyncio.create_task(_client(http, number, clients, rate, leaving, tally)) for number in range(clients)
        ]
        started = time.perf_counter()
        stop = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        ended, _ = await asyncio.wait({stop, *sending}, return_when=asyncio.FIRST_COMPLETED)
        seconds = time.perf_counter() - started
        for task in sending:
            task.cancel()
        if stop not in ended:
            raise RuntimeError("the storm ended by itself") from next(iter(ended)).exception()
    print(tally[0] / seconds)


@contextlib.contextmanager
def storming(kind: str, base: str, clients: int, rate: float, rates: list[float]) -> Iterator[None]:
    """Send bad input while the block runs; its rate is appended to `rates`."""
    if kind == QUIET:
        yield
        return
    command = [sys.executable, __file__, "--storm", base, "--clients", str(clients), "--rate", str(rate)]
    command += ["--leaving"] if kind == LEAVING else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(3 * SETTLE_S)
        yield
        output, _ = process.communicate(timeout=60)
        if process.returncode:
            raise RuntimeError(f"the storm failed with status {process.returncode}")
    rates.append(float(output))
    time.sleep(SETTLE_S)


# ---- the stream


async def _times(server: Server, tokens: int) -> list[float]:
    """Seconds between the tokens of one stream, as its client sees them."""
    arrivals: list[float] = []
    body = {**greedy("Once upon a time", tokens), "stream": True}
    async with server.asynchronous() as http, http.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        count = 0
        async for event in events(response):
            if event != "[DONE]" and event["meta_info"]["completion_tokens"] > count:
                new, count = event["meta_info"]["completion_tokens"] - count, event["meta_info"]["completion_tokens"]
                arrivals += [time.perf_counter()] * new  # tokens of the same event are 0 s apart
    if count != tokens:
        raise RuntimeError(f"the stream had {count} tokens")
    return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


def measure(server: Server, rounds: int, tokens: int, clients: int, rate: float) -> dict[str, dict[str, float]]:
    """By kind: p50 and p99 of the milliseconds between tokens (medians of the rounds), and bad requests per second."""
    percentiles_by_kind: dict[str, list[list[float]]] = {
        QUIET: [],
        REFUSED: [],
        LEAVING: [],
    }  # 99 percentiles per round
    rates: dict[str, list[float]] = {kind: [] for kind in percentiles_by_kind}
    asyncio.run(_times(server, tokens))
    for _ in range(rounds):
        for kind, percentiles in percentiles_by_kind.items():
            with storming(kind, server.base, clients, rate, rates[kind]):
                percentiles.append(statistics.quantiles(asyncio.run(_times(server, tokens)), n=100))
    return {
        kind: {
            "p50_ms": 1000 * statistics.median(one[49] for one in percentiles),
            "p99_ms": 1000 * statistics.median(one[98] for one in percentiles),
            "bad_requests_per_second": statistics.fmean(rates[kind]) if rates[kind] else 0.0,
        }
        for kind, percentiles in percentiles_by_kind.items()
    }


def show(figures: dict[str, dict[str, float]]) -> None:
    table = Table("stream", "p50 ms", "p99 ms", "p50 / quiet", "p99 / quiet", "bad requests / s")
    quiet = figures[QUIET]
    for kind, row in figures.items():
        cells = [row["p50_ms"], row["p99_ms"], row["p50_ms"] / quiet["p50_ms"], row["p99_ms"] / quiet["p99_ms"]]
        table.add_row(kind, *(f"{cell:.2f}" for cell in cells), f"{row['bad_requests_per_second']:.0f}")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--clients", type=int, default=8, help="concurrent clients that send bad input")
    parser.add_argument("--rate", type=float, default=100, help="maximum bad requests per second")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--storm", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--leaving", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="for srv launch")
    options = parser.parse_args()
    if options.storm:
        asyncio.run(storm(options.storm, options.clients, options.rate, options.leaving))
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        launched(Path(folder) / "log", *LIMITS, *options.arguments) as server,
    ):
        figures = measure(server, options.rounds, options.tokens, options.clients, options.rate)
        server.stop()
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
