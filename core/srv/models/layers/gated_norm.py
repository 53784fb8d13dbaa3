"""An RMS norm with a gate that follows from its result (A.X-K2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.norm import RMSNorm


class GatedRMSNorm(RMSNorm):
    """y sigmoid(fc2(silu(fc1(y)))), where y is the RMS norm of x. `rank`: the outputs of fc1.

    `prefix`: of the names of the weights. Every rank has the whole gate.
    """

    def __init__(self, factory: LayerFactory, prefix: str, dim: int, eps: float, rank: int) -> None:
        super().__init__(factory.context, dim, eps)
        self.down_proj = factory.linear({f"{prefix}.mlp.fc1": rank}, dim, False)
        self.up_proj = factory.linear({f"{prefix}.mlp.fc2": dim}, rank, False)

    def forward(self, x: Tensor) -> Tensor:
        return self._gated(super().forward(x))

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = super().add_and_norm(x, residual)
        return self._gated(normed), total

    def _gated(self, normed: Tensor) -> Tensor:
        gate = self.up_proj.kernel(F.silu(self.down_proj.kernel(normed)))
        return (normed * gate.float().sigmoid()).to(normed.dtype)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.down_proj, self.up_proj

    def weight_views(self, name: str) -> dict[str, Tensor]:
        """That of the norm; those of the gate are its projections'."""
        return super().weight_views(f"{name}.norm")
