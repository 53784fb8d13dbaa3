"""The device's memory: capacity, accounting and addresses.

The data is in host memory. Its device address is the host address plus `ADDRESS_OFFSET`, which no process can have
mapped, so a host kernel that gets a device pointer crashes, as with a real accelerator. A device may have more memory
than the machine that simulates it: a large block is mapped without being reserved, and uses only host pages that are
touched. This module knows no operators.
"""

from __future__ import annotations

import mmap
import platform
import sys
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from srv.testing.simulated_device.refusals import Refusals

# Bit 55 is above every user-space address of Linux and macOS, and fits the signed 64-bit pointers of
# PyTorch. Two live host blocks never overlap, so neither do two live device blocks.
ADDRESS_OFFSET = 1 << 55

# Blocks are counted in whole granules, as caching device allocators do.
GRANULE = 512

# Blocks of at least this size are separate mappings.
MMAP_THRESHOLD = 1 << 20

# Python's mmap module does not name MAP_NORESERVE; this is Linux's on x86 and ARM.
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


class Block(Protocol):
    """A block of device memory, allocated for as long as this object lives; its storage holds a reference."""

    @property
    def host(self) -> torch.UntypedStorage:
        """The host storage with the data."""


class Blocks(Protocol):
    """The memory for new tensors: the device's, or a graph's part of it."""

    def place(self, host: Tensor) -> Tensor:
        """`host`, a tensor without other references, or a copy of it in an existing block."""

    def allocate(self, host: torch.UntypedStorage) -> Block:
        """Count `host` as device memory. Raises torch.OutOfMemoryError if there is not enough."""


class Allocation:
    """One block of device memory. Its bytes count as allocated for as long as this object lives.

    An operator with `out=` may move `host` to larger memory, which has a block of its own from then on.
    """

    __slots__ = ("__weakref__", "_address", "_memory", "_size", "host")

    def __init__(self, memory: DeviceMemory, host: torch.UntypedStorage, size: int) -> None:
        self._memory = memory
        self._size = size
        self._address = host.data_ptr()
        self.host = host

    def __del__(self) -> None:
        self._memory.release(self._size, self.host if self.host.data_ptr() == self._address else None)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """New host memory that the device can access by itself, uninitialized."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.untyped_storage().simulated_pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Whether a host tensor is in memory from `pinned`."""
    return getattr(tensor.untyped_storage(), "simulated_pinned", False)


def fill(host: torch.UntypedStorage, byte: int) -> None:
    """Overwrite all bytes of a block."""
    torch.empty(0, dtype=torch.uint8).set_(host).fill_(byte)


class DeviceMemory:
    """Accounts for the blocks of one device, with a capacity in bytes. It is thread-safe.

    freed: called with the host memory of a block that is freed, while operators that were enqueued before may use it.
    """

    def __init__(self, capacity: int, refusals: Refusals) -> None:
        self.capacity = capacity
        self.peak = 0
        self.freed: Callable[[torch.UntypedStorage], None] | None = None
        self._refusals = refusals
        self._allocated = 0
        # Re-entrant, because the garbage collector may delete an Allocation inside `allocate`.
        self._lock = threading.RLock()
        self._mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()

    @property
    def allocated(self) -> int:
        return self._allocated

    @property
    def free(self) -> int:
        return self.capacity - self._allocated

    def reset_peak(self) -> None:
        self.peak = self._allocated

    def place(self, host: Tensor) -> Tensor:
        """`host` itself: its memory becomes device memory."""
        return host

    def allocate(self, host: torch.UntypedStorage) -> Allocation:
        """Count `host` as device memory. Raises torch.OutOfMemoryError if there is not enough."""
        nbytes = host.nbytes()
        size = -(-nbytes // GRANULE) * GRANULE
        with self._lock:
            if self._allocated + size > self.capacity:
                raise self._exhausted(nbytes)
            self._allocated += size
            if self._allocated > self.peak:
                self.peak = self._allocated
        return Allocation(self, host, size)

    def reserve(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of host memory for a block. Raises torch.OutOfMemoryError if the device has less free."""
        if self._allocated + nbytes > self.capacity:
            raise self._exhausted(nbytes)
        if nbytes < MMAP_THRESHOLD:
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
        """Zero a host view. A whole mapped block is discarded instead of written, so that it uses no host memory."""
        mapping = self._mapped.get(view.data_ptr())
        whole = mapping is not None and view.is_contiguous() and view.nbytes == len(mapping)
        if mapping is not None and whole and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)
        else:
            view.zero_()

    def release(self, size: int, host: torch.UntypedStorage | None) -> None:
        """Count `size` bytes as free. host: their memory; None if it is gone."""
        with self._lock:
            self._allocated -= size
        if self.freed is not None and host is not None:
            self.freed(host)

    def _exhausted(self, nbytes: int) -> torch.OutOfMemoryError:
        return self._refusals.out_of_memory(nbytes, self.free, self.capacity)
