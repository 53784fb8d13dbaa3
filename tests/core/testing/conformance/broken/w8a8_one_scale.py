"""All rows of a step share one activation scale, so requests affect each other's precision.

Caught by op.linear_w8a8 at L2, naming "129x64".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.float()
    scale = wide.abs().amax() / 127  # the fault
    out = (wide / scale).round() @ weight.float().T * scale * weight_scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


MANIFEST = manifest("w8a8_one_scale", platform=with_op("linear_w8a8", linear_w8a8))
