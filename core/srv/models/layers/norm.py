"""Normalisation. Each layer binds its op once, when it is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.models.layers.context import BuildContext
from srv.models.layers.op_layer import TORCH
from srv.models.layers.weight_module import WeightModule
from srv.platform.interface import OpArgs


class Norm(WeightModule, ABC):
    """A norm over the last axis, with a weight [dim]. `name`: in the checkpoint; "" if no file has the weight."""

    weight: nn.Parameter
    name: str = ""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """[T, dim] -> [T, dim]."""

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x), each [T, dim]."""
        total = residual + x
        return self.forward(total), total

    def weight_views(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight} if self.name else {}


class LayerNorm(Norm):
    """(x - mean(x)) / std(x) · weight + bias (Ba et al. 2016, arXiv:1607.06450), computed by torch's own operator.

    The bias is optional.
    """

    def __init__(self, context: BuildContext, dim: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight, self.eps, self.dim = context.empty(dim), eps, (dim,)
        self.bias = context.empty(dim) if bias else None
        context.ops.note_own("layer_norm", OpArgs(context.dtype, {"dim": dim}), TORCH)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.dim, self.weight, self.bias, self.eps)

    def weight_views(self) -> dict[str, Tensor]:
        views = super().weight_views()
        return views if self.bias is None else {**views, f"{self.name}.bias": self.bias}


class UnitOffsetLayerNorm(LayerNorm):
    """As `LayerNorm`, with 1 + weight in place of the weight (Nemotron); `prepare_loaded` computes the sum."""

    def __init__(self, context: BuildContext, dim: int, eps: float, bias: bool = True) -> None:
        super().__init__(context, dim, eps, bias)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones_like(self.weight), persistent=False)

    def prepare_loaded(self) -> None:
        torch.add(self.weight, 1, out=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.dim, self.scale, self.bias, self.eps)


class RMSNorm(Norm):
    """x / rms(x) · weight (Zhang and Sennrich 2019, arXiv:1910.07467), optionally fused with a residual addition."""

    def __init__(self, context: BuildContext, dim: int, eps: float, with_residual: bool = True) -> None:
        super().__init__()
        self.weight, self.eps = context.empty(dim), eps
        self._rms_norm = context.bind("rms_norm", dim=dim)
        self._add_rms_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
        if with_residual:
            self._add_rms_norm = context.ops.bind("add_rms_norm", OpArgs(context.dtype, {"dim": dim}))

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self._add_rms_norm is None:
            return super().add_and_norm(x, residual)
        return self._add_rms_norm(x, residual, self.weight, self.eps)


class UnitOffsetRMSNorm(RMSNorm):
    """x / rms(x) · (1 + weight), as in Gemma: computed in float32, and rounded once to the model's dtype.

    The ops run in float32 with `scale`, which is 1 + weight: in bfloat16 the sum would lose most bits of the weight,
    and the ops would round before they multiply by it. `prepare_loaded` computes it.
    """

    def __init__(self, context: BuildContext, dim: int, eps: float, with_residual: bool = True) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.dtype = context.empty(dim), eps, context.dtype
        self.scale: Tensor
        scale = torch.ones(dim, dtype=torch.float32, device=context.device)
        self.register_buffer("scale", scale, persistent=False)
        wide = OpArgs(torch.float32, {"dim": dim})
        offered = context.ops.offers("rms_norm", wide)
        self._rms_norm = context.ops.bind("rms_norm", wide) if offered else _rms_norm
        if not offered:
            context.ops.note_own("rms_norm", wide, TORCH)
        self._add_rms_norm = None
        if with_residual and self.dtype == torch.float32:
            self._add_rms_norm = context.ops.bind("add_rms_norm", wide)

    def prepare_loaded(self) -> None:
        torch.add(self.weight.float(), 1, out=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x.float(), self.scale, self.eps).to(self.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self._add_rms_norm is None:
            return super().add_and_norm(x, residual)
        return self._add_rms_norm(x, residual, self.scale, self.eps)


def joined(norm: Norm | None, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(what the next part reads, residual + x). `x`: None before the first layer."""
    if x is not None and norm is not None:
        return norm.add_and_norm(x, residual)
    total = residual if x is None else residual + x
    return (total if norm is None else norm.forward(total)), total


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """For platforms whose ops compute in the model's dtype only."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
