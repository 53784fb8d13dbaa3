"""An op adds in place to its argument, which the caller still uses.

Caught by op.add_rms_norm at L2, naming "argument 1 was changed".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from srv_kernels import reference

    normed, total = reference.add_rms_norm(x, residual, weight, eps)
    residual.copy_(total)  # the fault
    return normed, total


MANIFEST = manifest("op_changes_arguments", platform=with_op("add_rms_norm", add_rms_norm))
