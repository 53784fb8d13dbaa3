"""Rows of a GGUF matrix are returned sorted and without duplicates instead of in the order of the indices.

Caught by op.rows_gguf at L2, naming "Q4_0".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def rows_gguf(rows: Tensor, stored: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
    from srv_kernels import reference

    return reference.rows_gguf(rows, stored, indices.sort().values, dtype)  # the fault


MANIFEST = with_blocks("blocks_rows_in_order", "rows_gguf", rows_gguf)
