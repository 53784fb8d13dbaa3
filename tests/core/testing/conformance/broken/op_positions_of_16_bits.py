"""An op reads positions as integers of 16 bits without a sign.

Caught by op.rotary at L2, naming "positions up to 131071".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    from srv_kernels import reference

    return reference.rotary(q, k, cos_sin, positions % 65536)  # the fault


MANIFEST = manifest("op_positions_of_16_bits", platform=with_op("rotary", rotary))
