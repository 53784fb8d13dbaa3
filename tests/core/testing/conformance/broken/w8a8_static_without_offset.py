"""Inputs of static 8-bit layers are quantized without the offset of the checkpoint.

Caught by op.linear_w8a8_static at L2, naming "linear_w8a8_static".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def linear_w8a8_static(
    x: Tensor, weight: Tensor, input_scale: Tensor, input_offset: Tensor, quant_bias: Tensor, deq_scale: Tensor
) -> Tensor:
    from srv_kernels import reference

    no_offset = input_offset * 0  # the fault
    return reference.linear_w8a8_static(x, weight, input_scale, no_offset, quant_bias, deq_scale)


MANIFEST = manifest("w8a8_static_without_offset", platform=with_op("linear_w8a8_static", linear_w8a8_static))
