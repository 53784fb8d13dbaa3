"""Products with Q4_1 blocks of GGUF files ignore the minimum of each block.

Caught by op.linear_gguf at L2, naming "Q4_1".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_blocks

if TYPE_CHECKING:
    from torch import Tensor


def linear_gguf(x: Tensor, rows: Tensor, stored: str) -> Tensor:
    from srv_kernels import reference

    if stored == "Q4_1":
        blocks = rows.clone().view(rows.shape[0], -1, 20)
        blocks[:, :, 2:4] = 0  # the fault
        rows = blocks.view_as(rows)
    return reference.linear_gguf(x, rows, stored)


MANIFEST = with_blocks("blocks_half_a_scale", "linear_gguf", linear_gguf)
