"""Products with 8-bit weights quantize their inputs too, like those of W8A8.

Caught by op.linear_int8 at L2, naming "1x64".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_capability

if TYPE_CHECKING:
    from torch import Tensor


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    from srv_kernels import reference

    return reference.linear_w8a8(x, weight, weight_scale, bias)  # the fault


MANIFEST = with_capability("int8_rounds_inputs", "int8_weights", ("linear_int8",), "linear_int8", linear_int8)
