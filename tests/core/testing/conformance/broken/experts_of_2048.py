"""The kernel stages 2048 elements of a token, and reads no more.

Caught by op.experts at L2, naming "wide hidden states".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def experts(x: Tensor, *rest: Any) -> Tensor:
    from srv_kernels import expert_reference

    near = x.clone()
    near[:, 2048:] = 0  # the fault
    return expert_reference.experts(near, *rest)


MANIFEST = manifest("experts_of_2048", platform=with_op("experts", experts))
