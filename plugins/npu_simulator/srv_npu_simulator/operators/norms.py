"""RMS norms and SwiGLU, on host views. Computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from srv_npu_simulator.operators.checks import FLOATS, Rules


def rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, rstd): y = self * rstd * gamma over the dimensions of gamma; rstd float32, of size 1 there."""
    rules = Rules("npu_rms_norm")
    rules.dtype("self", self, FLOATS)
    rules.dtype("gamma", gamma, (self.dtype, torch.float32))
    _check_gamma(rules, "self", self, gamma, epsilon)
    return _normalised(self.float(), gamma, epsilon, self.dtype)


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """(y, rstd, x): x = x1 + x2, rounded to their dtype, is the new residual; y is its RMS norm."""
    rules = Rules("npu_add_rms_norm")
    rules.dtype("x1", x1, FLOATS)
    rules.same_dtype("x2", x2, "x1", x1.dtype)
    rules.shape("x2", x2, x1.shape, "x1 and x2 are added without broadcasting")
    rules.same_dtype("gamma", gamma, "x1", x1.dtype)
    _check_gamma(rules, "x1", x1, gamma, epsilon)
    total = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = _normalised(total.float(), gamma, epsilon, x1.dtype)
    return y, rstd, total


def _check_gamma(rules: Rules, of: str, x: Tensor, gamma: Tensor, epsilon: float) -> None:
    rules.require(1 <= x.dim() <= 8, of, f"of shape {tuple(x.shape)}", "must have 1 to 8 dimensions")
    described = f"of shape {tuple(gamma.shape)}"
    rules.require(1 <= gamma.dim() <= x.dim(), "gamma", described, f"must have 1 to {x.dim()} dimensions")
    rules.shape("gamma", gamma, x.shape[x.dim() - gamma.dim() :], f"the last dimensions of {of}")
    rules.require(epsilon > 0, "epsilon", epsilon, "must be above 0")


def _normalised(x: Tensor, gamma: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    over = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.square().mean(dim=over, keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(dtype), rstd


def swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half, along `dim`."""
    rules = Rules("npu_swiglu")
    rules.dtype("self", self, FLOATS)
    rules.contiguous("self", self)
    rules.require(-self.dim() <= dim < self.dim(), "dim", dim, f"must be a dimension of self, which has {self.dim()}")
    described = f"of shape {tuple(self.shape)}"
    rules.require(self.shape[dim] % 2 == 0, "self", described, f"must have an even size along dim {dim}")
    gate, up = self.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(self.dtype)
