"""The simulated card's memory: how much there is, how much is taken, and at which addresses.

The bytes lie in host memory, at an address that is `ADDRESS_OFFSET` lower than the device address, so that a
host kernel which is handed a device pointer faults. A card has more memory than the machine that simulates it
need have: a large block is mapped without being reserved, and costs the host only the pages that are touched.
This module knows no operators.
"""

from __future__ import annotations

import mmap
import platform
import sys
import threading
from weakref import WeakValueDictionary

import torch

# Bit 55: above every user-space address, and still positive as a signed 64-bit pointer.
ADDRESS_OFFSET = 1 << 55

# torch_npu's caching allocator hands out whole granules.
GRANULE = 512

# From this size on a block is a mapping of its own.
MAPPED_FROM = 1 << 20

# Python's mmap module does not name MAP_NORESERVE; this is Linux's on x86 and ARM.
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


class Allocation:
    """One block of device memory. Its bytes count as taken for as long as this object lives.

    `host` is the storage that holds the bytes; `acl_format` the layout they are said to be in (2: ND).
    """

    __slots__ = ("__weakref__", "_memory", "_size", "acl_format", "host")

    def __init__(self, memory: DeviceMemory, host: torch.UntypedStorage, size: int) -> None:
        self._memory = memory
        self._size = size
        self.host = host
        self.acl_format = 2

    def __del__(self) -> None:
        self._memory.give_back(self._size)


class DeviceMemory:
    """Counts the blocks of one card against its capacity (bytes). Safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.peak = 0
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

    def allocate(self, host: torch.UntypedStorage) -> Allocation:
        """Count `host` as device memory; torch.OutOfMemoryError if there is too little left."""
        nbytes = host.nbytes()
        size = -(-nbytes // GRANULE) * GRANULE
        with self._lock:
            if self._taken + size > self.capacity:
                raise self._exhausted(nbytes)
            self._taken += size
            self.peak = max(self.peak, self._taken)
        return Allocation(self, host, size)

    def reserve(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of host memory for a block; torch.OutOfMemoryError if the card has less than that."""
        if self._taken + nbytes > self.capacity:
            raise self._exhausted(nbytes)
        if nbytes < MAPPED_FROM:
            return torch.empty(nbytes, dtype=torch.uint8)
        try:
            mapping = mmap.mmap(-1, nbytes, flags=_MAP_FLAGS)
        except OSError as error:
            raise torch.OutOfMemoryError(
                f"the host that simulates npu:0 cannot map {nbytes} bytes ({error}); use less of the card"
            ) from error
        block = torch.frombuffer(mapping, dtype=torch.uint8)
        self._mapped[block.data_ptr()] = mapping
        return block

    def clear(self, view: torch.Tensor) -> None:
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
        return torch.OutOfMemoryError(
            f"NPU out of memory. Tried to allocate {nbytes} bytes on npu:0 (simulated), "
            f"but {self.free} of {self.capacity} are free. Use less of it: a smaller batch, or a smaller KV pool."
        )
