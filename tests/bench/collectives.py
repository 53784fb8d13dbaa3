"""Measure the collective operations between ranks on the CPU: through shared memory, and over gloo.

    python tests/bench/collectives.py [--ranks 2] [--rounds 5]

Prints microseconds per float32 all-reduce and all-gather as seen by rank 0, and ratios to gloo and to copying the same
bytes within one process. Both paths take turns, so that a busy machine slows both. Owns the measurement; a test must
not assert its results.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from srv.dist.group import RankGroup
from srv_cpu.communicator import CpuCommunicator

SIZES = (2 * 1024, 64 * 1024, 4 * 1024 * 1024)  # bytes
MOST_CALLS, BYTES = 200, 64 * 1024 * 1024  # per measurement


def microseconds(call: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls * 1e6


def measure(rank: int, size: int, directory: str, rounds: int) -> None:
    torch.set_num_threads(1)
    shared = CpuCommunicator(RankGroup("shared", rank, size, directory, 60.0, 60.0))
    with patch.object(mmap, "mmap", side_effect=OSError("not for this group")):
        gloo = CpuCommunicator(RankGroup("gloo", rank, size, directory, 60.0, 60.0))
    for bytes_ in SIZES:
        source = torch.zeros(bytes_ // 4)
        target = torch.empty_like(source)
        paths: dict[str, Callable[[], object]] = {
            "copy": lambda source=source, target=target: target.copy_(source),
            "all_reduce shared": lambda source=source: shared.all_reduce(source),
            "all_reduce gloo": lambda source=source: gloo.all_reduce(source),
            "all_gather shared": lambda source=source: shared.all_gather(source),
            "all_gather gloo": lambda source=source: gloo.all_gather(source),
        }
        times = alternate(paths, gloo, rounds, min(MOST_CALLS, BYTES // bytes_))
        if rank == 0:
            report(bytes_, times)
    gloo.barrier()
    os._exit(0)  # destroying gloo's group at the end of the interpreter may end the process with an error


def alternate(
    paths: dict[str, Callable[[], object]], communicator: CpuCommunicator, rounds: int, calls: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(rounds + 1):
        for name, call in paths.items():
            communicator.barrier()
            spent = microseconds(call, calls)
            if number:  # the first round warms up
                times[name].append(spent)
    return times


def report(bytes_: int, times_by_path: dict[str, list[float]]) -> None:
    """Medians, and the best of the rounds, which a machine with other work disturbs least."""
    for name, choose in (("median", statistics.median), ("best", min)):
        spent = {path: choose(times) for path, times in times_by_path.items()}
        for operation in ("all_reduce", "all_gather"):
            shared, gloo = spent[f"{operation} shared"], spent[f"{operation} gloo"]
            ratios = f"{shared / gloo:.3f} of gloo's {gloo:.1f}, {shared / spent['copy']:.1f} times a copy"
            print(f"{operation} of {bytes_ // 1024} KiB, {name}: {shared:.1f} us, {ratios}", flush=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    context = get_context("spawn")
    with TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=measure, args=(rank, options.ranks, directory, options.rounds))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main(sys.argv[1:])
