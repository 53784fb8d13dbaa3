"""Of experts with equal scores, the router chooses the one with the highest id.

Caught by op.route_experts at L2, naming "equal scores".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def route_experts(logits: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    from srv_kernels import expert_reference

    flipped = None if bias is None else bias.flip(-1)
    ids, weights = expert_reference.route_experts(logits.flip(-1), flipped, *rest)  # the fault
    return logits.shape[1] - 1 - ids, weights


MANIFEST = manifest("route_last_of_equal", platform=with_op("route_experts", route_experts))
