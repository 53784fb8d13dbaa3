"""The communicator of the CPU platform, in real processes."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tempfile import TemporaryDirectory

import torch
from gloo_ranks import CASES, numbers, run_rank

from srv.dist.group import RankGroup
from srv_kernels.cpu.library import load

RANKS = 3
TIMEOUT_S = 2.0


def test_operations_of_three_ranks() -> None:
    """Equal bits on all ranks, also in captured steps; an error after the timeout if a rank does not join."""
    with TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, get_context("spawn")) as pool:
        groups = [RankGroup("tensor", rank, RANKS, folder, TIMEOUT_S, 120.0) for rank in range(RANKS)]
        results = list(pool.map(run_rank, groups))
    sums = results[0][0]
    for rank, (own_sums, gathered, replays, error, seconds) in enumerate(results):
        assert own_sums == sums, f"rank {rank} has other bits than rank 0"
        assert all(gathered)
        # per rank: 2 * (1 + 2 + 3) + (rank + 1); the second replay has doubled inputs, so every number doubles
        if load().library is not None:
            assert replays == [[13.0, 14.0, 15.0], [26.0, 28.0, 30.0]]
        if rank != 1:
            assert error.startswith(f"rank {rank} of group tensor cannot reach the others: ")
            assert seconds < TIMEOUT_S + 2
    for (rows, dtype), stored in zip(CASES, sums, strict=True):
        total = torch.frombuffer(bytearray(stored), dtype=dtype).view(rows, -1)
        inputs = torch.stack([numbers(rank, rows, dtype) for rank in range(RANKS)])
        rounding = 4 * torch.finfo(dtype).eps * float(inputs.double().abs().max())
        torch.testing.assert_close(total.double(), inputs.double().sum(0), rtol=0, atol=rounding)
