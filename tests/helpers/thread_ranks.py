"""Ranks as threads of one process: a communicator without a device, for tests of sharded layers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from srv.dist.group import RankGroup

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
