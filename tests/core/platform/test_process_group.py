"""Collective operations of process groups, over gloo on host tensors in place of NCCL or HCCL: two ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from srv.dist.group import RankGroup
from srv.errors import RankLost
from srv.platform.process_group import Membership, ProcessGroupCommunicator

HOST = torch.device("cpu")


def gloo(member: Membership) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = member.timeout
    return ProcessGroupGloo(member.store, member.rank, member.size, options)


def on_two_ranks(folder: Path, run: Callable[[ProcessGroupCommunicator, int], Any], timeout_s: float = 30) -> list[Any]:
    def one(rank: int) -> Any:
        group = RankGroup("tensor", rank, 2, str(folder), timeout_s=timeout_s, start_timeout_s=30)
        return run(ProcessGroupCommunicator(group, HOST, gloo), rank)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_sums_and_gathers(tmp_path: Path) -> None:
    def run(communicator: ProcessGroupCommunicator, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = torch.full((3,), float(rank + 1))
        total = communicator.all_reduce(tensor)
        assert total is tensor
        communicator.barrier()
        return total, communicator.all_gather(torch.tensor([[rank, 7]]).T)  # not contiguous

    for total, gathered in on_two_ranks(tmp_path, run):
        assert total.tolist() == [3.0, 3.0, 3.0]
        assert gathered.tolist() == [[[0], [7]], [[1], [7]]]


def test_a_member_that_does_not_join_is_reported(tmp_path: Path) -> None:
    def run(communicator: ProcessGroupCommunicator, rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(RankLost) as raised:
            communicator.all_reduce(torch.ones(2))
        return str(raised.value)

    text, _ = on_two_ranks(tmp_path, run, timeout_s=1)
    assert text.startswith("rank 0 of group tensor cannot reach the others: ")


def test_a_sum_needs_a_contiguous_tensor(tmp_path: Path) -> None:
    def run(communicator: ProcessGroupCommunicator, rank: int) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            communicator.all_reduce(torch.ones(2, 3).T)

    on_two_ranks(tmp_path, run)
