"""An op takes the mean of at most 4096 elements, one block of its kernel.

Caught by op.rms_norm at L2, naming "x5120".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from srv_kernels import reference

    if x.shape[-1] <= 4096:
        return reference.rms_norm(x, weight, eps)
    wide = x.float()
    mean = wide[..., :4096].square().mean(-1, keepdim=True)  # the fault
    return (wide * (mean + eps).rsqrt()).to(x.dtype) * weight


MANIFEST = manifest("op_norm_of_4096", platform=with_op("rms_norm", rms_norm))
