"""The router chooses eight experts at most, and repeats the first of them.

Caught by op.route_experts at L2, naming "Qwen3-Next".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def route_experts(logits: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    from srv_kernels import expert_reference

    ids, weights = expert_reference.route_experts(logits, bias, *rest)
    ids[:, 8:] = ids[:, :1]  # the fault
    return ids, weights


MANIFEST = manifest("route_to_eight", platform=with_op("route_experts", route_experts))
