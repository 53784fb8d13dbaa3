"""The communicator of the CPU platform, in real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from communicating_ranks import ABSENT, RankProcesses, use, wait_for_absent
from every import every

from srv_kernels.cpu.library import load

RANKS = 3
TIMEOUT_S = 1.0
TOLERANCE_S = 50.0  # by which a machine with other work may exceed it; less than the limit of a group that is aborted

shares_memory = pytest.mark.skipif(
    load().library is None or not hasattr(os, "memfd_create"),
    reason="ranks share memory with the native library on Linux: build it with python -m srv_kernels.cpu.build",
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(RANKS) as processes:
        yield processes


@shares_memory
def test_operations_through_shared_memory(ranks: RankProcesses, tmp_path: Path) -> None:
    check_operations(ranks, tmp_path, unmappable=None)


def test_all_ranks_use_gloo_if_one_cannot_map_the_memory(ranks: RankProcesses, tmp_path: Path) -> None:
    check_operations(ranks, tmp_path, unmappable=2)


def check_operations(ranks: RankProcesses, folder: Path, unmappable: int | None) -> None:
    """Equal bits on all ranks and correct sums, also in captured steps; nothing is left."""
    first, *others = ranks.run(use, folder, 30.0, unmappable)
    assert first is not None
    for rank, used in enumerate(others, 1):
        assert used is not None
        assert used.sums == first.sums, f"rank {rank} has other bits than rank 0"
    for used in (first, *others):
        assert used is not None
        assert not used.faults
        assert used.mapped == (unmappable is None, False)
        # Per rank: 2 * (1 + 2 + 3) + (rank + 1); the second replay has doubled inputs, so every number doubles.
        if load().library is not None:
            assert used.replays == [[13.0, 14.0, 15.0], [26.0, 28.0, 30.0]]
    assert {file.name for file in folder.iterdir()} <= {"tensor.store"}


@shares_memory
@every(
    ("how", "timeout_s", "cause", "cause_of_absent"),
    [
        ("late", TIMEOUT_S, "rank 1 has not joined for 1 s", "they waited 1 s for it"),
        ("aborted", 60.0, "the group was aborted", "the group was aborted"),
    ],
)
def test_ranks_that_wait_end_with_an_error(
    ranks: RankProcesses, how: str, timeout_s: float, cause: str, cause_of_absent: str, tmp_path: Path
) -> None:
    for rank, outcome in enumerate(ranks.run(wait_for_absent, tmp_path, timeout_s, how)):
        assert outcome is not None
        error, seconds = outcome
        wanted = cause_of_absent if rank == ABSENT else cause
        assert error == f"rank {rank} of group tensor cannot reach the others: {wanted}"
        assert seconds < TIMEOUT_S + TOLERANCE_S


@shares_memory
def test_a_killed_rank_is_named_by_the_others(ranks: RankProcesses, tmp_path: Path) -> None:
    outcomes = ranks.run(wait_for_absent, tmp_path, TIMEOUT_S, "killed")
    assert outcomes[ABSENT] is None
    for rank in {*range(RANKS)} - {ABSENT}:
        lost = outcomes[rank]
        assert lost is not None
        error, seconds = lost
        assert error == f"rank {rank} of group tensor cannot reach the others: rank 1 has not joined for 1 s"
        assert seconds < TIMEOUT_S + TOLERANCE_S
