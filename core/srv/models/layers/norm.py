"""Normalisation. Each layer binds its op once, when it is built."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from srv.models.layers.context import BuildContext
from srv.platform.interface import OpArgs


class RMSNorm(nn.Module):
    """x / rms(x) · weight (Zhang and Sennrich 2019, arXiv:1910.07467), optionally fused with a residual addition."""

    def __init__(self, context: BuildContext, dim: int, eps: float, with_residual: bool = True) -> None:
        super().__init__()
        self.weight, self.eps = context.empty(dim), eps
        self._rms_norm = context.bind("rms_norm", dim=dim)
        self._add_rms_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
        if with_residual:
            self._add_rms_norm = context.ops.bind("add_rms_norm", OpArgs(context.dtype, {"dim": dim}))

    def forward(self, x: Tensor) -> Tensor:
        """[T, dim] -> [T, dim]."""
        return self._rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x), each [T, dim]."""
        if self._add_rms_norm is None:
            raise TypeError("this norm was built without a residual")
        return self._add_rms_norm(x, residual, self.weight, self.eps)
