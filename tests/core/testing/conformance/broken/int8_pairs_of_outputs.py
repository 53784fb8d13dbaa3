"""A kernel computes two outputs at a time, and leaves out the last of an odd number.

Caught by op.linear_int8 at L2, naming "1x333 to 131".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_capability

if TYPE_CHECKING:
    from torch import Tensor


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    from srv_kernels import reference

    out = reference.linear_int8(x, weight, weight_scale, bias)
    out[:, len(weight) // 2 * 2 :] = 0  # the fault
    return out


MANIFEST = with_capability("int8_pairs_of_outputs", "int8_weights", ("linear_int8",), "linear_int8", linear_int8)
