"""A product in tiles of 128 rows leaves out a last tile of one row.

Caught by op.linear_w8a8 at L2, naming "129x64".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    from srv_kernels import reference

    out = reference.linear_w8a8(x, weight, weight_scale, bias)
    if len(x) > 1 and len(x) % 128 == 1:
        out[-1] = 0  # the fault
    return out


MANIFEST = manifest("w8a8_last_row_of_129", platform=with_op("linear_w8a8", linear_w8a8))
