"""The norms of a model, by their parts. Those with plain weights are in `srv.models.layers.norm`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from srv.models import blueprint
from srv.models.blueprint.latent import GatedNorm
from srv.models.layers.norm import LayerNorm, Norm, RMSNorm, UnitOffsetRMSNorm
from srv.models.layers.op_layer import TORCH
from srv.models.layers.weight_module import WeightModule
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs


def make_norm(part: blueprint.Norm, place: Place) -> Norm:
    """`place`: of what the norm is a part of."""
    if isinstance(part, GatedNorm):
        made: Norm = GatedRMSNorm(part, place)
    elif not part.rms:
        made = LayerNorm(place.context, part.size, part.eps, part.bias)
    elif part.wide:
        made = UnitOffsetRMSNorm(place.context, part.size, part.eps, part.adds)
    else:
        made = RMSNorm(place.context, part.size, part.eps, part.adds)
    if part.learned:
        made.name = place.within(part).prefix
    else:
        made.weight.fill_(1)
    return made


class HeadNorms(WeightModule):
    """A LayerNorm without bias for each of several heads: weights [heads, dim]."""

    def __init__(self, part: blueprint.HeadNorms, place: Place) -> None:
        super().__init__()
        self.name, self.joint = place.within(part).prefix, part.joint
        self.weight, self.eps, self.dim = place.context.empty(part.heads, part.size), part.eps, (part.size,)
        place.context.ops.note_own("layer_norm", OpArgs(place.context.dtype, {"dim": part.size}), TORCH)

    def forward(self, x: Tensor) -> Tensor:
        """[T, heads, dim] -> [T, heads, dim]."""
        return F.layer_norm(x, self.dim, None, None, self.eps) * self.weight

    def weight_views(self) -> dict[str, Tensor]:
        if self.joint:
            return {f"{self.name}.weight": self.weight}
        return {f"{self.name}.norms.{head}.weight": weight for head, weight in enumerate(self.weight)}


class GatedRMSNorm(RMSNorm):
    """y sigmoid(fc2(silu(fc1(y)))), where y is the RMS norm of x (A.X-K2). Every rank has the whole gate."""

    def __init__(self, part: GatedNorm, place: Place) -> None:
        super().__init__(place.context, part.size, part.eps, part.adds)
        self.down_proj, self.up_proj = map(place.within(part).linear, (part.down, part.up))

    def forward(self, x: Tensor) -> Tensor:
        return self._gated(super().forward(x))

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = super().add_and_norm(x, residual)
        return self._gated(normed), total

    def _gated(self, normed: Tensor) -> Tensor:
        gate = self.up_proj.kernel(F.silu(self.down_proj.kernel(normed)))
        return (normed * gate.float().sigmoid()).to(normed.dtype)

    def weight_views(self) -> dict[str, Tensor]:
        """That of the norm; those of the gate are its projections'."""
        return {f"{self.name}.norm.weight": self.weight}
