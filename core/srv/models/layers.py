"""The parts that decoders are made of. Each binds its op once, when it is built.

Owns weights in the model's dtype on the model's device. Must not know checkpoints: loaders fill views of
these weights by name (see `Decoder.targets`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.platform.interface import OpArgs
from srv.platform.ops import Ops


@dataclass(frozen=True, slots=True)
class Place:
    """Where and in which type layers are built, and whose ops they call."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter to be filled by a loader."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype), requires_grad=False)

    def bind(self, op: str, **sizes: int) -> Callable[..., Tensor]:
        """The platform's implementation of an op for this dtype and these sizes."""
        return self.ops.bind(op, OpArgs(self.dtype, sizes))


class Linear(nn.Module):
    """y = x Wᵀ + b, by a kernel that the platform may exchange.

    `weight` [out, in] and `bias` [out] or None are what was loaded. `kernel(x [T, in]) -> [T, out]` is what
    `forward` calls; a platform's `post_load` may set it to one that works on a repacked weight, and may then
    replace `weight` by an empty tensor. `shared` says that `weight` is also the embedding: it must stay.
    """

    def __init__(self, place: Place, inputs: int, outputs: int, bias: bool, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.shared = weight is not None
        self.weight = place.empty(outputs, inputs) if weight is None else weight
        self.bias = place.empty(outputs) if bias else None
        self.kernel: Callable[[Tensor], Tensor] = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: torch's own matrix product."""
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x)


class Embedding(nn.Module):
    """A row of `weight` [vocab, hidden] for each token."""

    def __init__(self, place: Place, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = place.empty(vocab, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) · weight (Zhang and Sennrich 2019, arXiv:1910.07467), with and without a residual added first."""

    def __init__(self, place: Place, dim: int, eps: float, with_residual: bool = True) -> None:
        super().__init__()
        self.weight, self.eps = place.empty(dim), eps
        self._norm = place.bind("rms_norm", dim=dim)
        self._add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
        if with_residual:
            self._add_norm = place.ops.bind("add_rms_norm", OpArgs(place.dtype, {"dim": dim}))

    def forward(self, x: Tensor) -> Tensor:
        """[T, dim] -> [T, dim]."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x), each [T, dim]."""
        if self._add_norm is None:
            raise TypeError("this norm was built without a residual")
        return self._add_norm(x, residual, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (SwiGLU, Shazeer 2020, arXiv:2002.05202); gate and up are one matrix."""

    def __init__(self, place: Place, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.gate_up = Linear(place, hidden, 2 * intermediate, bias)
        self.down = Linear(place, intermediate, hidden, bias)
        self._activate = place.bind("silu_and_mul", dim=intermediate)

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.down(self._activate(self.gate_up(x)))
        return activated
