"""Page tables as FlashInfer and aiter read them: the pages of all rows in one list, with offsets.

page_table [rows, columns]          indices [total]              indptr [rows + 1]     last [rows]
4 7 0 0      (length 20)            4 7 9                        0 2 3                 4 9
9 0 0 0      (length 9)             pages of 16 tokens

For layers with a sliding window, the pages behind it are left out: they may belong to other requests, whose memory may
hold NaN, and kernels multiply what is masked by a weight of 0. Kernels count positions from a row's end.
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


def page_indices(batch: AttentionBatch, page_size: int, transfers: Transfers, window: int | None = None) -> PageIndices:
    """Of the batch, whose KV lengths are known on the host. `window`: that of the layers."""
    lengths = np.asarray(batch.kv_lens, dtype=np.int64)
    first = np.zeros_like(lengths)  # the first page that a query of the row sees
    if window is not None:
        first = np.maximum(lengths - np.asarray(batch.query_lens) - window + 1, 0) // page_size
    pages = -(-lengths // page_size) - first
    indptr = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(pages, out=indptr[1:])
    row = np.repeat(np.arange(len(lengths)), pages)
    column = np.arange(int(indptr[-1])) - indptr[row] + first[row]
    where = transfers.upload(np.stack((row, column)))
    last = lengths - (first + pages - 1) * page_size
    return PageIndices(indptr.astype(np.int32), last.astype(np.int32), batch.page_table[where[0], where[1]])
