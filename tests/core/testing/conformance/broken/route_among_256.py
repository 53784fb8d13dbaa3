"""The router reads the logits of 256 experts at most.

Caught by op.route_experts at L2, naming "Kimi K2".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def route_experts(logits: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    from srv_kernels import expert_reference

    near = None if bias is None else bias[:256]
    return expert_reference.route_experts(logits[:, :256], near, *rest)  # the fault


MANIFEST = manifest("route_among_256", platform=with_op("route_experts", route_experts))
