"""The kernel for one row does not add the bias.

Caught by op.linear_int8 at L2, naming "1x333 to 131".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_capability

if TYPE_CHECKING:
    from torch import Tensor


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    from srv_kernels import reference

    return reference.linear_int8(x, weight, weight_scale, None if len(x) == 1 else bias)  # the fault


MANIFEST = with_capability("int8_one_row_without_bias", "int8_weights", ("linear_int8",), "linear_int8", linear_int8)
