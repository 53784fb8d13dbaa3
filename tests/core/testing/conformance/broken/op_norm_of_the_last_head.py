"""An op writes to one row per token, so that of the heads of a token each gets the result of the last.

Caught by op.rms_norm at L2, naming "6 heads of 128 of a fused projection".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from srv_kernels import reference

    out = reference.rms_norm(x, weight, eps)
    return out if x.dim() < 3 else out[:, -1:].expand_as(out)  # the fault


MANIFEST = manifest("op_norm_of_the_last_head", platform=with_op("rms_norm", rms_norm))
