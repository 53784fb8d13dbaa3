"""An op computes at most 1,024 rows, and returns the others as they are.

Caught by op.rms_norm at L2, naming "2100 rows".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    import torch

    from srv_kernels import reference

    return torch.cat((reference.rms_norm(x[:1024], weight, eps), x[1024:]))  # the fault


MANIFEST = manifest("op_many_rows", platform=with_op("rms_norm", rms_norm))
