"""An op rotates at most 64 heads of a token, as many as a program holds.

Caught by op.rotary at L2, naming "96/8 heads of 128".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    from srv_kernels import reference

    turned = reference.rotary(q, k, cos_sin, positions)
    turned[0][:, 64:] = q[:, 64:]  # the fault
    return turned


MANIFEST = manifest("op_rotates_64_heads", platform=with_op("rotary", rotary))
