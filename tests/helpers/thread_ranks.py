"""Ranks as threads of one process: a communicator without a device, for tests of sharded layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.dist.mesh import Axis, Mesh
from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import JoinedGroup
from srv.worker.load import abort, join_groups

Result = TypeVar("Result")
TIMEOUT_S = 60


class ThreadCommunicator:
    """Implements `srv.platform.interface.Communicator` for the ranks that share `slots` and `barrier`."""

    def __init__(self, rank: int, slots: list[Tensor], barrier: Barrier) -> None:
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def _exchange(self, tensor: Tensor) -> Tensor:
        self._slots[self._rank] = tensor
        self._barrier.wait(TIMEOUT_S)
        gathered = torch.stack(self._slots)
        self._barrier.wait(TIMEOUT_S)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._exchange(tensor.clone()).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor)

    def barrier(self) -> None:
        self._barrier.wait(TIMEOUT_S)

    def abort(self) -> None:
        self._barrier.abort()


def on_ranks(size: int, run: Callable[[RankGroup, ThreadCommunicator], Result]) -> list[Result]:
    """The results of `run` on each of `size` ranks, which run together."""
    slots, barrier = [torch.empty(0)] * size, Barrier(size)

    def one(rank: int) -> Result:
        communicator = ThreadCommunicator(rank, slots, barrier)
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
        self._lock, self._groups = Lock(), dict[str, tuple[list[Tensor], Barrier]]()

    def communicator(self, group: RankGroup) -> ThreadCommunicator:
        with self._lock:
            slots, barrier = self._groups.setdefault(group.name, ([torch.empty(0)] * group.size, Barrier(group.size)))
        return ThreadCommunicator(group.rank, slots, barrier)


def on_mesh(mesh: Mesh, run: Callable[[Mapping[Axis, JoinedGroup]], Result]) -> list[Result]:
    """The results of `run` on each rank of a mesh, with the groups that it has joined."""
    threads: Any = _Threads()

    def one(rank: int) -> Result:
        joined: dict[Axis, JoinedGroup] = {}
        join_groups(threads, mesh, RankGroup(rank=rank, size=mesh.tensor), joined)
        try:
            return run(joined)
        except BaseException:
            abort(joined)
            raise

    with ThreadPoolExecutor(mesh.tensor) as pool:
        return list(pool.map(one, range(mesh.tensor)))


def part_of(whole: Tensor, part: Slice | None) -> Tensor:
    """What a rank holds of a tensor of the whole model."""
    return whole if part is None else whole.narrow(part.axis, part.begin, part.end - part.begin)
