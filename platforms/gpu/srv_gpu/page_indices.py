"""Page tables as FlashInfer and aiter read them: the pages of all rows in one list, with offsets.

page_table [rows, columns]          indices [total]              indptr [rows + 1]     last [rows]
4 7 0 0      (length 20)            4 7 9                        0 2 3                 4 9
9 0 0 0      (length 9)             pages of 16 tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from srv.platform.interface import AttentionBatch
from srv.platform.transfers import Transfers

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageIndices:
    """indptr: int32 [rows + 1]; last: int32 [rows], the tokens in each row's last page; both on the host.

    indices: int32 [indptr[-1]] on the device, where alone the page numbers may exist.
    """

    indptr: Ints
    last: Ints
    indices: Tensor


def page_indices(batch: AttentionBatch, page_size: int, transfers: Transfers) -> PageIndices:
    """Of the batch, whose KV lengths are known on the host."""
    lengths = np.asarray(batch.kv_lens, dtype=np.int64)
    pages = -(-lengths // page_size)
    indptr = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(pages, out=indptr[1:])
    row = np.repeat(np.arange(len(lengths)), pages)
    column = np.arange(int(indptr[-1])) - indptr[row]
    where = transfers.upload(np.stack((row, column)))
    last = lengths - (pages - 1) * page_size
    return PageIndices(indptr.astype(np.int32), last.astype(np.int32), batch.page_table[where[0], where[1]])
