"""The rows of a step as native attention kernels read them: lengths, offsets and page tables at fixed addresses.

Owns what captured steps need: their metadata is updated in place. Must not know what the kernels compute.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from srv.errors import InternalError
from srv.platform.interface import AttentionBatch

Args = TypeVar("Args", bound=ctypes.Structure)
Lens = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Starts = np.ndarray[tuple[int], np.dtype[np.int32]]
SPLIT_KEYS = 1024  # keys of a row with one query that one work item attends to
UNDIVIDED = 1 << 40  # more keys than any row has


@dataclass(slots=True)
class AttentionMetadata(Generic[Args]):
    """The kernel arguments of a step that all layers share; they point into `lens`, `starts` and `table`.

    address: of `args`. lens: int32 [2, rows], query and KV lengths.
    """

    args: Args
    address: int
    lens: Lens
    starts: Starts
    table: Tensor


class NativeRows(ABC, Generic[Args]):
    """Plans the steps of one cache group."""

    def __init__(self) -> None:
        self._captured: dict[int, AttentionMetadata[Args]] = {}

    @abstractmethod
    def make_args(self, lens: Lens, starts: Starts, table: Tensor) -> Args:
        """The kernel's arguments, with those that all layers share."""

    def plan(self, batch: AttentionBatch) -> AttentionMetadata[Args]:
        """See `srv.platform.interface.AttentionBackend`. Updates a captured step's metadata in place."""
        if batch.graph is None:
            return self._metadata(batch)
        if batch.graph not in self._captured:
            self._captured[batch.graph] = self._metadata(batch)
        metadata = self._captured[batch.graph]
        if metadata.table.data_ptr() != batch.page_table.data_ptr():
            raise InternalError(
                f"the captured step of {batch.graph} rows got another page table than it was captured with"
            )
        metadata.lens[1] = batch.kv_lens if batch.lengths is None else batch.lengths.numpy()  # the host is the device
        return metadata

    def _metadata(self, batch: AttentionBatch) -> AttentionMetadata[Args]:
        kv_lens = batch.kv_lens if batch.lengths is None else batch.lengths.tolist()
        lens = np.array([batch.query_lens, kv_lens], dtype=np.int32)
        starts = np.zeros(lens.shape[1], dtype=np.int32)
        np.cumsum(lens[0, :-1], out=starts[1:])
        table = batch.page_table.contiguous()
        args = self.make_args(lens, starts, table)
        return AttentionMetadata(args, ctypes.addressof(args), lens, starts, table)
