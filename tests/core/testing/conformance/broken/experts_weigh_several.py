"""Results are weighted only if a token has several experts.

Caught by op.experts at L2, naming "experts without a token".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def experts(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    from srv_kernels import expert_reference

    weights = weights if ids.shape[1] > 1 else weights.new_ones(weights.shape)  # the fault
    return expert_reference.experts(x, ids, weights, *rest)


MANIFEST = manifest("experts_weigh_several", platform=with_op("experts", experts))
