"""A product adds up at most 8192 inputs.

Caught by op.linear_w8a8 at L2, naming "2x14336 to 32".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    from srv_kernels import reference

    return reference.linear_w8a8(x[:, :8192], weight[:, :8192], weight_scale, bias)  # the fault


MANIFEST = manifest("w8a8_of_8192_inputs", platform=with_op("linear_w8a8", linear_w8a8))
