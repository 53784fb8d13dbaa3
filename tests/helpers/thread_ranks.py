"""Ranks as threads of one process: a communicator without a device, for tests of sharded layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.dist.mesh import Axis, Mesh
from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import JoinedGroup
from srv.worker.load import join_groups, leave_groups

Result = TypeVar("Result")
TIMEOUT_S = 60


class Meeting:
    """Where the ranks of a group exchange tensors; of all-to-all operations, also how many rows go to whom."""

    def __init__(self, size: int) -> None:
        self.slots, self.barrier = [torch.empty(0)] * size, Barrier(size)
        self.splits: list[Sequence[int]] = [()] * size


class ThreadCommunicator:
    """Implements `srv.platform.interface.Communicator` for the ranks that meet there."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank = rank
        self._slots, self._splits, self._barrier = meeting.slots, meeting.splits, meeting.barrier

    def _exchange(self, tensor: Tensor) -> Tensor:
        self._slots[self._rank] = tensor
        self._barrier.wait(TIMEOUT_S)
        gathered = torch.stack(self._slots)
        self._barrier.wait(TIMEOUT_S)
        return gathered

    def _exchange_rows(self, tensor: Tensor, send: Sequence[int]) -> list[Sequence[Tensor]]:
        """The rows of all members, split by where they go."""
        self._slots[self._rank] = tensor
        self._splits[self._rank] = send
        self._barrier.wait(TIMEOUT_S)
        rows = [each.split(list(sizes)) for each, sizes in zip(self._slots, self._splits, strict=True)]
        self._barrier.wait(TIMEOUT_S)
        return rows

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._exchange(tensor.clone()).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor).sum(0).chunk(len(self._slots))[self._rank]

    def all_to_all(self, tensor: Tensor) -> Tensor:
        rows = [len(tensor) // len(self._slots)] * len(self._slots)
        return self.all_to_all_uneven(tensor, rows, rows)

    def all_to_all_uneven(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return torch.cat([rows[self._rank] for rows in self._exchange_rows(tensor, send)])

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self._exchange(tensor.clone())[source])

    def send(self, tensor: Tensor, target: int) -> None:
        raise NotImplementedError("no test sends from one rank to another")

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        raise NotImplementedError("no test sends from one rank to another")

    def barrier(self) -> None:
        self._barrier.wait(TIMEOUT_S)

    def abort(self) -> None:
        self._barrier.abort()


def on_ranks(size: int, run: Callable[[RankGroup, ThreadCommunicator], Result]) -> list[Result]:
    """The results of `run` on each of `size` ranks, which run together."""
    meeting = Meeting(size)

    def one(rank: int) -> Result:
        communicator = ThreadCommunicator(rank, meeting)
        try:
            return run(RankGroup(rank=rank, size=size), communicator)
        except BaseException:
            communicator.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


class _Threads:
    """What a platform offers to ranks that are threads: a communicator for each group that they join."""

    name = "threads"

    def __init__(self) -> None:
        self._lock, self._groups = Lock(), dict[str, Meeting]()

    def communicator(self, group: RankGroup) -> ThreadCommunicator:
        with self._lock:
            meeting = self._groups.setdefault(group.name, Meeting(group.size))
        return ThreadCommunicator(group.rank, meeting)


def on_mesh(mesh: Mesh, run: Callable[[Mapping[Axis, JoinedGroup]], Result]) -> list[Result]:
    """The results of `run` on each rank of a mesh, with the groups that it has joined."""
    threads: Any = _Threads()

    def one(rank: int) -> Result:
        joined: dict[Axis, JoinedGroup] = {}
        join_groups(threads, {"communicator"}, mesh, RankGroup(rank=rank, size=mesh.tensor), joined)
        try:
            return run(joined)
        except BaseException:
            leave_groups(joined)
            raise

    with ThreadPoolExecutor(mesh.tensor) as pool:
        return list(pool.map(one, range(mesh.tensor)))


def part_of(whole: Tensor, part: Slice | None) -> Tensor:
    """What a rank holds of a tensor of the whole model."""
    return whole if part is None else whole.narrow(part.axis, part.begin, part.end - part.begin)
