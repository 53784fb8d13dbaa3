"""What a platform sees of a layer with weight matrices: the op that it calls, and the tensors that the op reads.

Owns the seam between layers and a platform's `post_load`. A platform chooses a kernel by the name of the op, whatever
the class of the layer and the method by which its weights are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TORCH = "torch"  # the implementation of layers that call torch's own operator


class OpLayer(nn.Module):
    """A layer computed by an op on its matrices: `kernel(x)`, which a platform may replace after loading.

    (Experts have `kernel(x, ids, weights)`: `srv.models.layers.experts`.)

    `op`: a contract of `srv_kernels.contracts`, or one of torch's own operators: "linear" (weight, bias) and
    "embedding" (weight); "" if no platform has a kernel for it. `dtype`: that of the results. `inputs`: the columns of
    each matrix. `float32_results`: the results should be float32, the sums before they are rounded to `dtype`; a kernel
    that cannot return those returns `dtype`. `tied`: another layer owns the matrix, so it may be neither changed nor
    released here. `offloaded`: the matrices are in buffers that are filled before each use, likewise. `delegates`: a
    layer within this one computes, and kernel plans name only that one. `role`: how kernel plans name the layer, if
    that is not by its op. `implementation`: the name of what computes `kernel`, as `OpSpec.name` has it; a platform
    that gives the layer another kernel sets it. `kernel` is what `forward` calls. Other layers call it directly,
    because the overhead of `nn.Module.__call__` would show in a step with so many products.
    """

    op: str = ""
    dtype: torch.dtype
    inputs: int
    kernel: Callable[..., Tensor]
    float32_results: bool = False
    tied: bool = False
    offloaded: bool = False
    delegates: bool = False
    role: str = ""
    implementation: str = ""

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

    @property
    def column_order(self) -> Tensor | None:
        """The columns of x in the order of the op's inputs, int64 [inputs]; None: x is as the op takes it.

        A platform's kernel for such a layer must take them in this order: `kernel(x)` is called with x as it is.
        """
        return None

    def weight_matrices(self) -> tuple[Tensor, ...]:
        """The matrices of `operands`, without what belongs to them (scales, biases)."""
        return tuple(next(iter(operands.values())) for operands in self.operands())

    def weight_tensors(self) -> tuple[Tensor, ...]:
        """The matrices, and the scales and zero points of quantized ones: what host memory may hold instead.

        Each is a tensor object that the layer keeps and reads at every call, not a view that it makes for one.
        """
        return self.weight_matrices()

    def release(self) -> None:
        """Free the matrices, which a new kernel has copied. The tensor objects stay, without elements."""
        for matrix in self.weight_matrices():
            matrix.data = matrix.data.new_empty((0, *matrix.shape[1:]))


def op_layers(model: nn.Module, *, offloaded: bool = False) -> Iterator[OpLayer]:
    """All layers of a model that a platform may give another kernel. `offloaded`: also those whose matrices are not
    on the device, so that no kernel may keep them."""
    layers = (module for module in model.modules() if isinstance(module, OpLayer))
    return (layer for layer in layers if offloaded or not layer.offloaded)
