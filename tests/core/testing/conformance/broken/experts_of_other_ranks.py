"""Experts count ids of other ranks as their own: the last expert computes them.

Caught by op.experts at L2, naming "ids of other experts".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, *rest: Any) -> Tensor:
    from srv_kernels import expert_reference

    return expert_reference.experts(x, ids.clamp(0, len(gate_up) - 1), weights, gate_up, *rest)  # the fault


MANIFEST = manifest("experts_of_other_ranks", platform=with_op("experts", experts))
