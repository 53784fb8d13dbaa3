"""What a platform sees of a layer with weight matrices: the op that it calls, and the tensors that the op reads.

Owns the seam between layers and a platform's `post_load`. A platform chooses a kernel by the name of the op, whatever
the class of the layer and the method by which its weights are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class OpLayer(nn.Module):
    """A layer computed by an op on its matrices: `kernel(x)`, which a platform may replace after loading.

    `op`: a contract of `srv_kernels.contracts`, or one of torch's own operators: "linear" (weight, bias) and
    "embedding" (weight); "" if no platform has a kernel for it. `dtype`: that of the results. `inputs`: the columns of
    each matrix. `tied`: another layer owns the matrix, so it may be neither changed nor released here. `kernel` is what
    `forward` calls. Other layers call it directly, because the overhead of `nn.Module.__call__` would show in a step
    with so many products.
    """

    op: str = ""
    dtype: torch.dtype
    inputs: int
    kernel: Callable[[Tensor], Tensor]
    tied: bool = False

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        """What the op reads beside x, by the names of its contract and in their order; the matrix comes first.

        There is one mapping per matrix, and the results for several matrices are concatenated. A tied layer returns the
        same tensor object as the layer that owns the matrix.
        """
        return ()

    @property
    def added_bias(self) -> Tensor | None:
        """A bias [out] that the layer adds to the result, because the op takes none."""
        return None

    def release(self) -> None:
        """Free the matrices, which a new kernel has copied. The tensor objects stay, without elements."""
        for operands in self.operands():
            matrix = next(iter(operands.values()))
            matrix.data = matrix.data.new_empty((0, *matrix.shape[1:]))


def op_layers(model: nn.Module) -> Iterator[OpLayer]:
    """All layers of a model that a platform may give another kernel."""
    return (module for module in model.modules() if isinstance(module, OpLayer))
