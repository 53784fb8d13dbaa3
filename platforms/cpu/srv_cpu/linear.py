"""Matrix products on repacked weights: oneDNN's own block layout, made once after loading.

torch's `F.linear` hands oneDNN a plain matrix, which it reads at about half the speed of a blocked one when
there are few rows (one row, bfloat16, two Zen 4 cores: 14 against 26 GB/s). The ops used are those that
torch's compiler emits for frozen weights; where torch has none, or the weight's dtype is not
served, the plain product stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srv.models.layers import Linear

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


def pack(model: torch.nn.Module) -> int:
    """Repack every Linear of the model, freeing the plain weight unless it is also the embedding.

    Returns how many were repacked.
    """
    if not packing_available():
        return 0
    packed = 0
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Linear) and module.weight.dtype in _DTYPES:
                module.kernel = PackedKernel(module.weight, module.bias)
                if not module.shared:
                    module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)
                packed += 1
    return packed
