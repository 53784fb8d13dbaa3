"""The parts that decoders are made of. Each binds its op once, when it is built.

Owns weights on the model's device; they know the names that checkpoints give them, so that loaders can fill
them (`targets`), and nothing of files. Weights that are stored in fewer bits are `srv.models.quantized`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A parameter to be filled by a loader, of the model's dtype or another."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=dtype or self.dtype), requires_grad=False)

    def bind(self, op: str, **sizes: int) -> Callable[..., Tensor]:
        """The platform's implementation of an op for this dtype and these sizes."""
        return self.ops.bind(op, OpArgs(self.dtype, sizes))


class Projection(nn.Module, ABC):
    """A matrix product [T, in] -> [T, out], by a kernel that the platform may exchange.

    `parts`: the checkpoint's names of the matrices that lie in this one, one below the other, with their rows.
    `kernel` is what `forward` calls, and what a layer calls itself: a step has so many products that torch's own way
    into a module would be felt. A platform's `post_load` may set it to one that works on a repacked weight, and may
    then put an empty tensor in the place of what was loaded.
    """

    kernel: Callable[[Tensor], Tensor]

    def __init__(self, parts: Mapping[str, int]) -> None:
        super().__init__()
        self.parts = dict(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x)

    @abstractmethod
    def targets(self) -> dict[str, Tensor]:
        """Views for a loader to fill, by the checkpoint's names."""

    def settle(self) -> str | None:
        """Called once all targets are filled. The reason why what was loaded cannot be multiplied, or None."""
        return None

    def sliced(self, suffix: str, whole: Tensor) -> dict[str, Tensor]:
        """Consecutive rows of a tensor, a view for each part."""
        views = torch.split(whole, list(self.parts.values()))
        return {f"{name}.{suffix}": view for name, view in zip(self.parts, views, strict=True)}


class Linear(Projection):
    """y = x Wᵀ + b in the model's dtype.

    weight [out, in], bias [out] or None. `shared` says that `weight` is also the embedding, which is filled as
    such, and must stay as it is.
    """

    def __init__(
        self, place: Place, parts: Mapping[str, int], inputs: int, bias: bool, weight: nn.Parameter | None = None
    ) -> None:
        super().__init__(parts)
        self.shared = weight is not None
        outputs = sum(parts.values())
        self.weight = place.empty(outputs, inputs) if weight is None else weight
        self.bias = place.empty(outputs) if bias else None
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: torch's own matrix product."""
        return F.linear(x, self.weight, self.bias)

    def targets(self) -> dict[str, Tensor]:
        targets = {} if self.shared else self.sliced("weight", self.weight)
        return targets if self.bias is None else targets | self.sliced("bias", self.bias)


class TokenEmbedding(nn.Module, ABC):
    """A row for each token: int64 [T] -> [T, hidden] of the model's dtype. `name`: the checkpoint's, of its weight."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def targets(self) -> dict[str, Tensor]:
        """What a loader fills, by the checkpoint's names."""


class Embedding(TokenEmbedding):
    """Rows of `weight` [vocab, hidden], in the model's dtype."""

    def __init__(self, place: Place, name: str, vocab: int, hidden: int) -> None:
        super().__init__(name)
        self.weight = place.empty(vocab, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def targets(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight}


class Weights:
    """Makes the layers that hold matrices, their weights to be filled: plain numbers of the model's dtype.

    Subclasses make other layers where a checkpoint stores its matrices in another way.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    def linear(self, parts: Mapping[str, int], inputs: int, bias: bool) -> Projection:
        """One product for the parts of a checkpoint that share an input; `parts`: their names and rows."""
        return Linear(self.place, parts, inputs, bias)

    def embedding(self, name: str, vocab: int, hidden: int) -> TokenEmbedding:
        return Embedding(self.place, name, vocab, hidden)

    def tied(self, name: str, embedding: TokenEmbedding) -> Projection:
        """The product with the embedding's own weight, as the output layer of many models is."""
        if not isinstance(embedding, Embedding):
            raise TypeError(f"{type(embedding).__name__} is not an embedding of plain numbers")
        vocab, hidden = embedding.weight.shape
        return Linear(self.place, {name: vocab}, hidden, bias=False, weight=embedding.weight)


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

    def __init__(self, weights: Weights, prefix: str, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        halves = {f"{prefix}.gate_proj": intermediate, f"{prefix}.up_proj": intermediate}
        self.gate_up = weights.linear(halves, hidden, bias)
        self.down = weights.linear({f"{prefix}.down_proj": hidden}, intermediate, bias)
        self._activate = weights.place.bind("silu_and_mul", dim=intermediate)

    def forward(self, x: Tensor) -> Tensor:
        return self.down.kernel(self._activate(self.gate_up.kernel(x)))
