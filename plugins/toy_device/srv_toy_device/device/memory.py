"""The device's memory: how much there is, how much is taken, and at which addresses.

The bytes really lie in host memory. Their device address is the host address plus `ADDRESS_OFFSET`, which
no process can have mapped: a host kernel that is handed a device pointer faults, as it would beside a real
accelerator. This module knows no tensors' shapes and no operators.
"""

from __future__ import annotations

import threading

import torch

# Bit 55: above every user-space address that Linux and macOS hand out, and within what PyTorch can carry in
# a signed 64-bit pointer. Two live host blocks never overlap, so neither do two live device blocks.
ADDRESS_OFFSET = 1 << 55

# Blocks are counted in whole granules, as caching device allocators do.
GRANULE = 512


class Allocation:
    """One block of device memory. Its bytes count as taken for as long as this object lives.

    `host` is the storage that really holds them.
    """

    __slots__ = ("_memory", "_size", "host")

    def __init__(self, memory: DeviceMemory, host: torch.UntypedStorage, size: int) -> None:
        self._memory = memory
        self._size = size
        self.host = host

    def __del__(self) -> None:
        self._memory.give_back(self._size)


class DeviceMemory:
    """Counts the blocks of one device against its capacity (bytes). Safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.peak = 0
        self._taken = 0
        # Re-entrant, because the garbage collector may end an Allocation inside `allocate`.
        self._lock = threading.RLock()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def free(self) -> int:
        return self.capacity - self._taken

    def allocate(self, host: torch.UntypedStorage) -> Allocation:
        """Count `host` as device memory; torch.OutOfMemoryError if there is too little left."""
        nbytes = host.nbytes()
        size = -(-nbytes // GRANULE) * GRANULE
        with self._lock:
            if self._taken + size > self.capacity:
                raise self.exhausted(nbytes)
            self._taken += size
            if self._taken > self.peak:
                self.peak = self._taken
        return Allocation(self, host, size)

    def require(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError unless `nbytes` more would fit: asked before the host reserves them."""
        if self._taken + nbytes > self.capacity:
            raise self.exhausted(nbytes)

    def give_back(self, size: int) -> None:
        with self._lock:
            self._taken -= size

    def exhausted(self, nbytes: int) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"toy:0 is out of memory: tried to allocate {nbytes} bytes, but {self.free} of {self.capacity} are free. "
            "Use less of it (a smaller batch, a smaller KV pool), or set SRV_TOY_MEMORY to a larger size."
        )
