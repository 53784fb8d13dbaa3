"""Products with FP8 weights apply the scale of a row's first block to all its blocks.

Caught by op.linear_fp8 at L2, naming "blocks of 48 x 32".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_capability

if TYPE_CHECKING:
    from torch import Tensor


def linear_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, block_outputs: int, block_inputs: int
) -> Tensor:
    from srv_kernels import reference

    first = scale[:, :1].expand_as(scale).contiguous()  # the fault
    return reference.linear_fp8(x, weight, first, bias, block_outputs, block_inputs)


MANIFEST = with_capability("fp8_first_block_scale", "fp8_weights", ("linear_fp8",), "linear_fp8", linear_fp8)
