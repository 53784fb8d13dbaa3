"""8-bit experts use the first expert's scales for all of them.

Caught by op.experts_int8 at L2, naming "element".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def experts_int8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    activation: str,
) -> Tensor:
    from srv_kernels import expert_reference

    scale = gate_up_scale[:1].expand_as(gate_up_scale)  # the fault
    return expert_reference.experts_int8(x, ids, weights, gate_up, scale, down, down_scale, activation)


MANIFEST = manifest("experts_int8_one_scale", platform=with_op("experts_int8", experts_int8))
