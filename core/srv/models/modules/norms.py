"""The norms of a model, by their parts. Those with plain weights are in `srv.models.layers.norm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.dist.group import RankGroup
from srv.models import blueprint
from srv.models.blueprint.latent import GatedNorm
from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.norm import LayerNorm, Norm, RMSNorm, UnitOffsetLayerNorm, UnitOffsetRMSNorm
from srv.models.layers.op_layer import TORCH
from srv.models.layers.weight_module import WeightModule
from srv.models.modules.place import Place
from srv.platform.interface import Communicator, OpArgs


def make_norm(part: blueprint.Norm, place: Place) -> Norm:
    """`place`: of what the norm is a part of."""
    if isinstance(part, GatedNorm):
        made: Norm = GatedRMSNorm(part, place)
    elif not part.rms:
        kind = UnitOffsetLayerNorm if part.wide else LayerNorm
        made = kind(place.context, part.size, part.eps, part.bias)
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
    """A LayerNorm without bias for each of several heads: weights [heads, dim], which each rank has of all heads."""

    def __init__(self, part: blueprint.HeadNorms, place: Place) -> None:
        super().__init__()
        self.name, self.joint = place.within(part).prefix, part.joint
        self.weight, self.eps, self.dim = place.context.empty(part.heads, part.size), part.eps, (part.size,)
        self._own = slice(*place.context.group.share(part.heads))
        place.context.ops.note_own("layer_norm", OpArgs(place.context.dtype, {"dim": part.size}), TORCH)

    def forward(self, x: Tensor) -> Tensor:
        """[T, heads of this rank, dim] -> the same."""
        return F.layer_norm(x, self.dim, None, None, self.eps) * self.weight[self._own]

    def weight_views(self) -> dict[str, Tensor]:
        if self.joint:
            return {f"{self.name}.weight": self.weight}
        return {f"{self.name}.norms.{head}.weight": weight for head, weight in enumerate(self.weight)}


class GroupMeans:
    """Means over groups of channels of which several ranks have parts: rank r of R a part of group r G // R of G."""

    def __init__(self, groups: int, group: RankGroup, communicator: Communicator | None) -> None:
        self._groups, self._number, self._communicator = groups, group.rank * groups // group.size, communicator
        self._share = groups / group.size  # of a group, on each of its ranks

    @staticmethod
    def of(groups: int, context: BuildContext) -> GroupMeans | None:
        """None if each rank has whole groups."""
        whole = groups % context.group.size == 0
        return None if whole else GroupMeans(groups, context.group, context.communicator)

    def of_squares(self, x: Tensor) -> Tensor:
        """x float32 [T, n], this rank's channels of its group -> the mean of the squares of the whole group, [T, 1]."""
        means = x.new_zeros(len(x), self._groups)
        means[:, self._number] = x.square().mean(-1) * self._share
        if self._communicator is not None:
            means = self._communicator.all_reduce(means)
        return means[:, self._number, None]


class DividedNorm(WeightModule):
    """An RMS norm of all heads, on one of several ranks, which has some of the heads."""

    def __init__(self, part: blueprint.JointNorm, place: Place) -> None:
        super().__init__()
        context = place.context
        begin, end = context.group.share(part.size, part.size // part.heads)
        self.name, self.eps, self.weight = place.within(part).prefix, part.eps, context.empty(end - begin)
        self._slice = Slice(0, begin, end, part.size)
        self._means = GroupMeans(1, context.group, context.communicator)
        context.ops.note_own(blueprint.JOINT_NORM, OpArgs(context.dtype, {"dim": end - begin}), TORCH)

    def forward(self, x: Tensor) -> Tensor:
        """[T, dim of this rank's heads] -> the same."""
        wide = x.float()
        return (wide * torch.rsqrt(self._means.of_squares(wide) + self.eps)).to(x.dtype) * self.weight

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight}

    def weight_slices(self) -> dict[str, Slice]:
        return {f"{self.name}.weight": self._slice}


class DividedNorms(WeightModule):
    """The RMS norms of the queries and of the keys of all heads, on one of several ranks, which has some of the heads.

    Ranks exchange the mean squares of both, float32 [T, 2], in one all-reduce. Their average is the mean over all heads
    because all ranks have equally many, and if keys are copied, each is on equally many ranks.
    """

    def __init__(self, q_norm: blueprint.JointNorm, k_norm: blueprint.JointNorm, place: Place) -> None:
        super().__init__()
        context, parts = place.context, (q_norm, k_norm)
        shares = [context.group.share(part.size, part.size // part.heads) for part in parts]
        self.names = tuple(f"{place.within(part).prefix}.weight" for part in parts)
        self.slices = tuple(Slice(0, *share, part.size) for share, part in zip(shares, parts, strict=True))
        self.q_weight, self.k_weight = (context.empty(end - begin) for begin, end in shares)
        self.eps, self.ranks, self.communicator = q_norm.eps, context.group.size, context.communicator
        for begin, end in shares:
            context.ops.note_own(blueprint.JOINT_NORM, OpArgs(context.dtype, {"dim": end - begin}), TORCH)

    @staticmethod
    def of(part: blueprint.Attention, place: Place) -> DividedNorms | None:
        """Those of an attention; None on a single rank, and without norms of all heads."""
        q_norm, k_norm = part.q_norm, part.k_norm
        if place.context.group.size == 1 or not isinstance(q_norm, blueprint.JointNorm):
            return None
        assert isinstance(k_norm, blueprint.JointNorm)
        return DividedNorms(q_norm, k_norm, place)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, D] and keys [T, KV heads, D] of this rank."""
        wide_q, wide_k = q.float(), k.float()
        means = torch.stack([each.square().mean((1, 2)) for each in (wide_q, wide_k)], 1)
        if self.communicator is not None:
            means = self.communicator.all_reduce(means).div_(self.ranks)
        of_q, of_k = torch.rsqrt(means + self.eps).view(-1, 2, 1, 1).unbind(1)
        q, k = (wide_q * of_q).to(q.dtype), (wide_k * of_k).to(k.dtype)
        return q * self.q_weight.view(q.shape[1:]), k * self.k_weight.view(k.shape[1:])

    def weight_views(self) -> dict[str, Tensor]:
        return dict(zip(self.names, (self.q_weight, self.k_weight), strict=True))

    def weight_slices(self) -> dict[str, Slice]:
        named = zip(self.names, self.slices, strict=True)
        return {name: part for name, part in named if part.end - part.begin < part.total}


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
