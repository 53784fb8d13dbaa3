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


def on_two_ranks(
    folder: Path, run: Callable[[ProcessGroupCommunicator, int], Any], timeout_s: float = 30, views: bool = True
) -> list[Any]:
    def one(rank: int) -> Any:
        group = RankGroup("tensor", rank, 2, str(folder), timeout_s=timeout_s, start_timeout_s=30)
        return run(ProcessGroupCommunicator(group, HOST, gloo, views=views), rank)

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


@pytest.mark.parametrize("views", [True, False])
def test_rows_that_go_from_rank_to_rank(views: bool, tmp_path: Path) -> None:
    """Also of types that gloo does not know, and of views that a library may not take."""

    def run(communicator: ProcessGroupCommunicator, rank: int) -> list[Any]:
        own = torch.arange(9, dtype=torch.int16)[1:].view(4, 2) * (rank + 1)
        sent, into = own[2:], torch.zeros(3, 2, dtype=torch.int16)[1:]
        found: list[Any] = [
            communicator.all_to_all(own),
            communicator.all_to_all_uneven(own, [3, 1], [3 - 2 * rank] * 2),
        ]
        found.append(communicator.reduce_scatter(own.float()))
        found.append(communicator.broadcast(own.clone(), 1))
        if rank:
            communicator.recv(into, 0)
            communicator.send(sent, 0)
        else:
            communicator.send(sent, 1)
            communicator.recv(into, 1)
        return [each.tolist() for each in (*found, into)]

    first, second = on_two_ranks(tmp_path, run, views=views)
    assert first[0] == [[1, 2], [3, 4], [2, 4], [6, 8]]
    assert second[0] == [[5, 6], [7, 8], [10, 12], [14, 16]]
    assert first[1] == [[1, 2], [3, 4], [5, 6], [2, 4], [6, 8], [10, 12]]
    assert second[1] == [[7, 8], [14, 16]]
    assert (first[2], second[2]) == ([[3, 6], [9, 12]], [[15, 18], [21, 24]])
    assert first[3] == second[3] == [[2, 4], [6, 8], [10, 12], [14, 16]]
    assert (first[4], second[4]) == ([[10, 12], [14, 16]], [[5, 6], [7, 8]])


@pytest.mark.parametrize(
    "call",
    [
        lambda communicator: communicator.reduce_scatter(torch.ones(3)),
        lambda communicator: communicator.all_to_all(torch.tensor(1.0)),
        lambda communicator: communicator.all_to_all_uneven(torch.ones(3), [1, 1], [1, 1]),
        lambda communicator: communicator.all_to_all_uneven(torch.ones(3), [4, -1], [1, 1]),
        lambda communicator: communicator.broadcast(torch.ones(3), 2),
        lambda communicator: communicator.recv(torch.ones(2, 3).T, 1),
    ],
)
def test_what_no_member_could_do_is_refused(call: Callable[[Any], Any], tmp_path: Path) -> None:
    def run(communicator: ProcessGroupCommunicator, rank: int) -> None:
        with pytest.raises(ValueError, match=r"all_to_all|reduce_scatter|broadcast|recv"):
            call(communicator)

    on_two_ranks(tmp_path, run)


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
