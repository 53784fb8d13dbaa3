"""An expert has room for 128 tokens of a step, and leaves out the others.

Caught by op.experts at L2, naming "all tokens to one expert".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, *rest: Any) -> Tensor:
    from srv_kernels import expert_reference

    local_ids = ids.clone()
    for expert in range(len(gate_up)):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        local_ids[tokens[128:], places[128:]] = -1  # the fault
    return expert_reference.experts(x, local_ids, weights, gate_up, *rest)


MANIFEST = manifest("experts_with_room_for_128", platform=with_op("experts", experts))
