"""An op rotates adjacent pairs, but the contract pairs elements that are half a vector apart.

Caught by op.rotary at L2, naming "heads of".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_ops import with_op
from toy_variant import manifest

if TYPE_CHECKING:
    from torch import Tensor


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    from srv_kernels import reference

    turned = cos_sin.shape[1]
    halves = torch.cat((torch.arange(0, turned, 2), torch.arange(1, turned, 2), torch.arange(turned, q.shape[2])))
    order = halves.to(q.device)
    out = reference.rotary(q[..., order], k[..., order], cos_sin, positions)  # the fault
    return out[0][..., order.argsort()], out[1][..., order.argsort()]


MANIFEST = manifest("op_rotary_interleaved", platform=with_op("rotary", rotary))
