"""What each of several rank processes does with the communicator of the CPU platform; returns plain values."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.errors import RankLost
from srv_cpu.communicator import GlooCommunicator
from srv_kernels.cpu.captured_graph import CapturedGraph, GraphMemoryPool
from srv_kernels.cpu.library import load

CASES: Sequence[tuple[int, torch.dtype]] = (
    (1, torch.float32),
    (5, torch.float32),
    (700, torch.float32),
    (64, torch.bfloat16),
    (64, torch.float16),
)


def numbers(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(rows, 37, generator=generator) * 10.0**rank).to(dtype)


def run_rank(group: RankGroup) -> tuple[list[bytes], list[bool], list[list[float]], str, float]:
    """(sums as bytes, whether everything was gathered, replays, the error when rank 1 stops, after how many seconds)"""
    torch.set_num_threads(1)
    communicator = GlooCommunicator(group)
    communicator.barrier()
    sums, gathered = [], []
    for rows, dtype in CASES:
        own = numbers(group.rank, rows, dtype)
        everything = torch.stack([numbers(rank, rows, dtype) for rank in range(group.size)])
        gathered.append(torch.equal(communicator.all_gather(own), everything))
        assert communicator.all_reduce(own) is own
        sums.append(bytes(own.view(torch.uint8).flatten().tolist()))
    replays = _replays(group, communicator) if load().library else []
    started, error = time.monotonic(), ""
    if group.rank == 1:
        time.sleep(group.timeout_s + 1)
    else:
        try:
            communicator.all_reduce(torch.ones(3))
        except RankLost as lost:
            error = str(lost)
    seconds = time.monotonic() - started
    communicator.abort()
    return sums, gathered, replays, error, seconds


def _replays(group: RankGroup, communicator: GlooCommunicator) -> list[list[float]]:
    """A captured step, run twice with other inputs."""
    source, out = torch.zeros(1, 4), torch.zeros(group.size, 1, 4)
    graph, found = CapturedGraph(GraphMemoryPool()), []
    with torch.inference_mode(), graph:
        out.copy_(communicator.all_gather(communicator.all_reduce(source * 2) + source))
    for _ in range(2):
        source.add_(group.rank + 1)
        with torch.inference_mode():
            graph.replay()
        found.append(out[:, 0, 0].tolist())
    return found
