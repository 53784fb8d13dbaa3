"""An op computes on the host and leaves its result there.

Caught by op.placement at L2, naming "result on cpu".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    from srv_kernels import reference

    return reference.silu_and_mul(x.to("cpu"))  # the fault


MANIFEST = manifest("op_on_host", platform=with_op("silu_and_mul", silu_and_mul))
