"""Matrix products on repacked weights: made once after loading, by the native kernels or else by oneDNN.

Native kernels read a weight from its first byte to its last: 32 GB/s where oneDNN's blocks are read at 12 (one row,
bfloat16, two Zen 4 cores, all weights of a model in turn, so that none lies in the caches). Without them oneDNN's
blocks are the next best: torch's `F.linear` hands oneDNN a plain matrix, which is slower still. The ops used are those
that torch's compiler emits for frozen weights; where torch has none, or the weight's dtype is not served, the plain
product stays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from srv.models.layers import Linear
from srv_kernels.cpu.library import load

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 16  # the batch that the layout is chosen for; it serves every other one with the same result


class PackedKernel:
    """y = x Wᵀ + b over a blocked copy of W."""

    __slots__ = ("_bias", "_linear", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._weight, self._bias, "none", [], "")


def packing_available() -> bool:
    """Whether this build of torch has oneDNN and its prepacking ops."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack(model: torch.nn.Module) -> tuple[int, str]:
    """Repack every Linear of the model, freeing the plain weight unless it is also the embedding.

    Returns how many were repacked, and by what.
    """
    kernel, name = _kernel()
    packed = 0
    if kernel is None:
        return packed, name
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Linear) and module.weight.dtype in _DTYPES:
                module.kernel = kernel(module.weight, module.bias)
                if not module.shared:
                    module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)
                packed += 1
    return packed, name


def _kernel() -> tuple[Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]] | None, str]:
    """Makes a product from a weight and a bias; None: the plain product stays. And a name for the log."""
    if load().library is not None:
        from srv_kernels.cpu import native_ops

        return native_ops.linear, f"native kernels, {load().isa}"
    if packing_available():
        return PackedKernel, "oneDNN"
    return None, "torch's plain products"
