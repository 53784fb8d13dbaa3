"""What bad input costs a running stream: its inter-token time quiet, and under two storms of bad input.

    python tests/bench/bad_input.py [--rounds 3] [--tokens 300] [--clients 4] [--json FILE] [-- arguments for srv]

The storms come from a process of their own, one request after the other from each client: `refused` sends every
bad input that the end-to-end tests know; in `refused and leaving` every tenth client asks for a long stream and
hangs up after a few tokens, which is work for the engine. Quiet and stormy streams take turns, so that a drifting
machine drifts for all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
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
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from bad_inputs import BAD_INPUTS, LIMITS
from e2e_support import Server, events, greedy, launched, leave_after

QUIET, REFUSED, LEAVING = "quiet", "refused", "refused and leaving"
LEAVE_EVERY = 10
SETTLE_S = 0.5  # for a storm to begin, and for its end to be over


# ---- the storm, in a process of its own


async def _client(http: httpx.AsyncClient, number: int, clients: int, leaving: bool, tally: list[int]) -> None:
    for count in range(number, sys.maxsize, clients):
        if leaving and count % LEAVE_EVERY == 0:
            await leave_after(http, greedy(f"Visitor {count}", 200), 3)
        else:
            bad = BAD_INPUTS[count % len(BAD_INPUTS)]
            response = await http.post(bad.path, content=bad.body)
            if response.status_code != bad.status:
                raise RuntimeError(f"{bad.name}: {response.status_code} {response.text}")
        tally[0] += 1


async def storm(base: str, clients: int, leaving: bool) -> None:
    """Send until standard input closes; then say how many requests a second that were."""
    tally = [0]
    async with httpx.AsyncClient(base_url=base, timeout=60) as http:
        sending = [asyncio.create_task(_client(http, number, clients, leaving, tally)) for number in range(clients)]
        started = time.perf_counter()
        stop = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        done, _ = await asyncio.wait({stop, *sending}, return_when=asyncio.FIRST_COMPLETED)
        seconds = time.perf_counter() - started
        for task in sending:
            task.cancel()
        if stop not in done:
            raise RuntimeError("the storm ended by itself") from next(iter(done)).exception()
    print(tally[0] / seconds)


@contextlib.contextmanager
def storming(kind: str, base: str, clients: int, rates: list[float]) -> Iterator[None]:
    """Bad input comes in while the block runs; its rate is appended to `rates`."""
    if kind == QUIET:
        yield
        return
    command = [sys.executable, __file__, "--storm", base, "--clients", str(clients)]
    command += ["--leaving"] if kind == LEAVING else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(3 * SETTLE_S)
        yield
        told, _ = process.communicate(timeout=60)
        if process.returncode:
            raise RuntimeError(f"the storm failed with status {process.returncode}")
    rates.append(float(told))
    time.sleep(SETTLE_S)


# ---- the stream


async def _times(server: Server, tokens: int) -> list[float]:
    """Seconds between the tokens of one stream, as its client sees them."""
    moments: list[float] = []
    body = {**greedy("Once upon a time", tokens), "stream": True}
    async with server.asynchronous() as http, http.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        count = 0
        async for event in events(response):
            if event != "[DONE]" and event["meta_info"]["completion_tokens"] > count:
                came, count = event["meta_info"]["completion_tokens"] - count, event["meta_info"]["completion_tokens"]
                # What came together counts as one wait and no waits.
                moments += [time.perf_counter()] * came
    if count != tokens:
        raise RuntimeError(f"the stream had {count} tokens")
    return [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]


def measure(server: Server, rounds: int, tokens: int, clients: int) -> dict[str, dict[str, float]]:
    """By kind: milliseconds p50 and p99 of all rounds' inter-token times, and bad requests a second."""
    gaps: dict[str, list[float]] = {QUIET: [], REFUSED: [], LEAVING: []}
    rates: dict[str, list[float]] = {kind: [] for kind in gaps}
    asyncio.run(_times(server, tokens))
    for _ in range(rounds):
        for kind, found in gaps.items():
            with storming(kind, server.base, clients, rates[kind]):
                found += asyncio.run(_times(server, tokens))
    return {
        kind: {
            "p50_ms": 1000 * statistics.median(found),
            "p99_ms": 1000 * statistics.quantiles(found, n=100)[98],
            "bad_requests_per_second": statistics.fmean(rates[kind]) if rates[kind] else 0.0,
        }
        for kind, found in gaps.items()
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--clients", type=int, default=4, help="that send bad input at once")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--storm", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--leaving", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="for srv launch")
    options = parser.parse_args()
    if options.storm:
        asyncio.run(storm(options.storm, options.clients, options.leaving))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        with launched(Path(folder) / "log", *LIMITS, *options.arguments) as server:
            figures = measure(server, options.rounds, options.tokens, options.clients)
            server.stop()
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
