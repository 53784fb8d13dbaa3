"""Memory that all ranks of a group on one host have mapped, and the collective operations through it.

Owns how the ranks come to map the same memory. The operations themselves, and how ranks wait for one another, are in
srv_kernels/cpu/native/shared_reduce.cpp. The memory has no name in any file system (`memfd_create`), so that nothing is
left behind however the ranks end.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Store

from srv.dist.group import RankGroup
from srv.errors import RankLost
from srv_kernels.cpu.library import load

SUMMED_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3}  # and their ids: Type in native/kernels.h
_STORE_KEY = "shared_memory"
_ABORTED = -1  # an outcome of an operation; others are 0, or 1 + the rank that has not joined
_NANOSECONDS = 1_000_000_000

logger = logging.getLogger(__name__)


class SharedMemory:
    """One member's mapping. Operations raise RankLost if a member does not join within `RankGroup.timeout_s`."""

    def __init__(self, group: RankGroup, library: ctypes.CDLL, descriptor: int) -> None:
        self._group, self._library = group, library
        self._mapping = mmap.mmap(descriptor, library.srv_shared_group_bytes(group.size))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._member = (self._address, group.size, group.rank, int(group.timeout_s * _NANOSECONDS))

    @classmethod
    def join(cls, group: RankGroup, store: Store, agree: Callable[[bool], bool]) -> SharedMemory | None:
        """Map the same memory on all members; None on all of them if one cannot.

        agree: whether its argument is true on all members.
        """
        library, descriptor, memory = load().library, None, None
        try:
            descriptor = _announce(library, group, store) if group.rank == 0 else _open(store)
            if library is not None and descriptor is not None:
                memory = cls(group, library, descriptor)
        except OSError as error:
            logger.info("rank %d cannot map the memory of group %s: %s", group.rank, group.name, error)
        try:
            return memory if agree(memory is not None) else None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` (contiguous, a dtype of SUMMED_DTYPES) by the sum over all members, in float32."""
        reduce, type_id = self._library.srv_shared_all_reduce, SUMMED_DTYPES[tensor.dtype]
        self._check(reduce(type_id, *self._member, tensor.data_ptr(), tensor.numel()))

    def all_gather(self, tensor: Tensor, gathered: Tensor) -> None:
        """Copy `tensor` of all members to `gathered` [members, *shape]; both are contiguous, of any dtype."""
        gather = self._library.srv_shared_all_gather
        self._check(gather(*self._member, tensor.data_ptr(), tensor.nbytes, gathered.data_ptr()))

    def reduce_scatter(self, tensor: Tensor, part: Tensor) -> None:
        """Write to `part` (contiguous) this member's part of the sum of `tensor` [members * n, *shape], as that of
        `all_reduce`.
        """
        reduce, type_id = self._library.srv_shared_reduce_scatter, SUMMED_DTYPES[tensor.dtype]
        self._check(reduce(type_id, *self._member, tensor.data_ptr(), part.numel(), part.data_ptr()))

    def all_to_all(self, tensor: Tensor, table: Sequence[int], received: Tensor) -> None:
        """Copy the parts of `tensor` of all members that are for this one to `received`; both are contiguous.

        table: the bytes that each member sends to each, [members, members]; the same on all.
        """
        exchange, sizes = self._library.srv_shared_all_to_all, (ctypes.c_int64 * len(table))(*table)
        self._check(exchange(*self._member, tensor.data_ptr(), ctypes.addressof(sizes), received.data_ptr()))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace `tensor` (contiguous, of any dtype) by that of the member `source`."""
        self._check(self._library.srv_shared_broadcast(*self._member, tensor.data_ptr(), tensor.nbytes, source))

    def abort(self) -> None:
        """Operations of all members fail from now on. The memory is released with this object."""
        self._library.srv_shared_abort(self._address)

    def _check(self, outcome: int) -> None:
        if outcome == 0:
            return
        missing, limit = outcome - 1, f"{self._group.timeout_s:g} s"
        if outcome == _ABORTED:
            cause = "the group was aborted"
        elif missing == self._group.rank:
            cause = f"they waited {limit} for it"
        else:
            cause = f"rank {missing} has not joined for {limit}"
        raise lost(self._group, cause)


def lost(group: RankGroup, cause: str) -> RankLost:
    return RankLost(f"rank {group.rank} of group {group.name} cannot reach the others: {cause}")


def _announce(library: ctypes.CDLL | None, group: RankGroup, store: Store) -> int | None:
    """Create the memory, and store the path under which the others can open it; an empty one if there is none."""
    descriptor, path = None, ""
    try:
        if library is not None and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create(f"srv-{group.name}")
            os.ftruncate(descriptor, library.srv_shared_group_bytes(group.size))
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        store.set(_STORE_KEY, path)
    return descriptor


def _open(store: Store) -> int | None:
    path = store.get(_STORE_KEY).decode()
    return os.open(path, os.O_RDWR | os.O_CLOEXEC) if path else None
