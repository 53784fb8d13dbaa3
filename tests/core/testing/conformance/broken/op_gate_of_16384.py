"""An op computes at most 16384 elements of a row, and leaves zeros in the others.

Caught by op.silu_and_mul at L2, naming "2x59136".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    from srv_kernels import reference

    out = reference.silu_and_mul(x)
    out[..., 16384:] = 0  # the fault
    return out


MANIFEST = manifest("op_gate_of_16384", platform=with_op("silu_and_mul", silu_and_mul))
