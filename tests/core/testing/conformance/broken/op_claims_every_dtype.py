"""An op declares support for every dtype, but computes bfloat16 in float16.

Caught by op.silu_and_mul at L2, naming "bfloat16".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    import torch

    from srv_kernels import reference

    if x.dtype != torch.bfloat16:
        return reference.silu_and_mul(x)
    return reference.silu_and_mul(x.half())  # the fault


MANIFEST = manifest("op_claims_every_dtype", platform=with_op("silu_and_mul", silu_and_mul))
