"""An op is wrong only for odd sizes: it omits the last element of a row from the mean.

Caught by op.rms_norm at L2, naming "x97".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from srv_kernels import reference

    even = x.shape[-1] // 2 * 2
    if even == x.shape[-1]:
        return reference.rms_norm(x, weight, eps)
    wide = x.float()
    mean = wide[..., :even].square().mean(-1, keepdim=True)  # the fault
    return (wide * (mean + eps).rsqrt()).to(x.dtype) * weight


MANIFEST = manifest("op_odd_sizes", platform=with_op("rms_norm", rms_norm))
