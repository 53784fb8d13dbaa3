"""The device's memory: how much there is, how much is taken, and at which addresses.

The bytes really lie in host memory. Their device address is the host address plus `ADDRESS_OFFSET`, which
no process can have mapped: a host kernel that is handed a device pointer faults, as it would beside a real
accelerator. A device may have more memory than the machine that simulates it: a large block is mapped without being
reserved, and costs the host only the pages that are touched. This module knows no operators.
"""

from __future__ import annotations

import mmap
import platform
import sys
import threading
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from srv.testing.simulated_device.refusals import Refusals

# Bit 55: above every user-space address that Linux and macOS hand out, and within what PyTorch can carry in
# a signed 64-bit pointer. Two live host blocks never overlap, so neither do two live device blocks.
ADDRESS_OFFSET = 1 << 55

# Blocks are counted in whole granules, as caching device allocators do.
GRANULE = 512

# From this size on a block is a mapping of its own.
MAPPED_FROM = 1 << 20

# Python's mmap module does not name MAP_NORESERVE; this is Linux's on x86 and ARM.
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


class Block(Protocol):
    """What a device storage holds on to: its memory is taken for as long as this lives."""

    @property
    def host(self) -> torch.UntypedStorage:
        """The storage that really holds the bytes."""


class Blocks(Protocol):
    """Where new tensors come from: the device's memory, or a graph's part of it."""

    def place(self, host: Tensor) -> Tensor:
        """`host`, a tensor that nobody else holds, or a copy of it in a block that is there already."""

    def allocate(self, host: torch.UntypedStorage) -> Block:
        """Count `host` as device memory; torch.OutOfMemoryError if there is too little left."""


class Allocation:
    """One block of device memory. Its bytes count as taken for as long as this object lives."""

    __slots__ = ("__weakref__", "_memory", "_size", "host")

    def __init__(self, memory: DeviceMemory, host: torch.UntypedStorage, size: int) -> None:
        self._memory = memory
        self._size = size
        self.host = host

    def __del__(self) -> None:
        self._memory.give_back(self._size)


class DeviceMemory:
    """Counts the blocks of one device against its capacity (bytes). Safe to use from several threads."""

    def __init__(self, capacity: int, refusals: Refusals) -> None:
        self.capacity = capacity
        self.peak = 0
        self._refusals = refusals
        self._taken = 0
        # Re-entrant, because the garbage collector may end an Allocation inside `allocate`.
        self._lock = threading.RLock()
        self._mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def free(self) -> int:
        return self.capacity - self._taken

    def reset_peak(self) -> None:
        self.peak = self._taken

    def place(self, host: Tensor) -> Tensor:
        """`host` itself: its own memory becomes the device's."""
        return host

    def allocate(self, host: torch.UntypedStorage) -> Allocation:
        """Count `host` as device memory; torch.OutOfMemoryError if there is too little left."""
        nbytes = host.nbytes()
        size = -(-nbytes // GRANULE) * GRANULE
        with self._lock:
            if self._taken + size > self.capacity:
                raise self._exhausted(nbytes)
            self._taken += size
            if self._taken > self.peak:
                self.peak = self._taken
        return Allocation(self, host, size)

    def reserve(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of host memory for a block; torch.OutOfMemoryError if the device has less than that left."""
        if self._taken + nbytes > self.capacity:
            raise self._exhausted(nbytes)
        if nbytes < MAPPED_FROM:
            return torch.empty(nbytes, dtype=torch.uint8)
        try:
            mapping = mmap.mmap(-1, nbytes, flags=_MAP_FLAGS)
        except OSError as error:
            raise torch.OutOfMemoryError(
                f"the host that simulates {self._refusals.device} cannot map {nbytes} bytes ({error}); "
                "use less of the device"
            ) from error
        block = torch.frombuffer(mapping, dtype=torch.uint8)
        self._mapped[block.data_ptr()] = mapping
        return block

    def clear(self, view: Tensor) -> None:
        """Set a host view to zero. A whole mapped block is dropped instead of written, and costs nothing again."""
        mapping = self._mapped.get(view.data_ptr())
        whole = mapping is not None and view.is_contiguous() and view.nbytes == len(mapping)
        if mapping is not None and whole and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)
        else:
            view.zero_()

    def give_back(self, size: int) -> None:
        with self._lock:
            self._taken -= size

    def _exhausted(self, nbytes: int) -> torch.OutOfMemoryError:
        return self._refusals.out_of_memory(nbytes, self.free, self.capacity)
