"""Staging memory of steps: it is reused, and grows as steps need more of it."""

from __future__ import annotations

import torch
from host_transfers import HostMemory

from srv.platform.transfers import Transfers


class Counting(HostMemory):
    """Host memory of a device that does not compute in it; `staged`: the bytes requested so far."""

    staged = 0

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = super().staging(shape, dtype)
        self.staged += memory.nbytes
        return memory


def test_memory_is_at_most_a_small_multiple_of_the_largest_step() -> None:
    platform = Counting()
    transfers = Transfers(platform, torch.device("meta"))
    for rows in range(1, 129):
        transfers.begin()
        transfers.upload(torch.zeros((rows, 100_000), dtype=torch.bool))
        copies = transfers.end()
        copies.wait()
        copies.release()
    assert platform.staged < 4 * 128 * 100_000
